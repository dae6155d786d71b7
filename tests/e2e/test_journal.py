"""A shard that is taken up goes on where the worker before has left it, and answers as if nobody had."""

import json
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.e2e.conftest import RealWorkers
from tests.rq_workers import Process, stats_of, wait_until

ROWS = 6
DRAWN: dict[str, Any] = {"max_tokens": 160, "temperature": 4.0, "seed": 7, "ignore_eos": True}
ASKS: dict[str, dict[str, Any]] = {
    "two samples": {"prompt_column": "text", "sampling": {**DRAWN, "n": 2}},
    "a chain": {
        "prompts": [
            {"name": "first", "template": "{text}"},
            {"name": "second", "template": "{first} and {text}"},
        ],
        "sampling": {**DRAWN, "max_tokens": 60},
    },
}


def start(workers: RealWorkers, name: str, **settings: str) -> Process:
    quick = {"TOKENMILL_JOURNAL_S": "0.1", "TOKENMILL_DETERMINISTIC": "1", "TOKENMILL_DRAIN_S": "0"}
    return workers.start("--name", name, queues=("bulk",), **{**quick, **settings})


def submit(workers: RealWorkers, output: Path, ask: dict[str, Any]) -> None:
    source = output.parent / "in.parquet"
    table = pa.table(
        {"id": range(ROWS), "text": [f"On day {row} of the year " for row in range(ROWS)]}
    )
    pq.write_table(table, source)
    workers.queue("bulk").enqueue("jobs.score_parquet", str(source), str(output), **ask)


def answers(output: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pq.read_table(output).to_pylist()
    return [
        {name: value for name, value in row.items() if name != "cached_tokens"} for row in found
    ]


def entries(output: Path) -> set[str]:
    """Return the entries that tell how far rows are, and are whole."""
    found = set()
    for path in (output / "_journal").glob("*.now.*"):
        with suppress(OSError, pa.ArrowInvalid):  # it is being written, or was replaced since
            pq.read_metadata(path)
            found.add(path.name)
    return found


def stop(process: Process, number: signal.Signals) -> None:
    process.send_signal(number)
    assert process.wait(timeout=60) == (0 if number == signal.SIGTERM else -number)


@pytest.mark.parametrize(
    ("ask", "number"),
    [
        ("two samples", signal.SIGKILL),
        pytest.param("two samples", signal.SIGTERM, marks=pytest.mark.long),
        pytest.param("a chain", signal.SIGKILL, marks=pytest.mark.long),
        pytest.param("a chain", signal.SIGTERM, marks=pytest.mark.long),
    ],
)
def test_it_goes_on_where_it_was(
    workers: RealWorkers, tmp_path: Path, ask: str, number: signal.Signals
) -> None:
    calm, output = tmp_path / "undisturbed", tmp_path / "out"
    submit(workers, calm, ASKS[ask])
    process = start(workers, "calm", TOKENMILL_JOURNAL_S="0")
    wait_until((calm / "_SUCCESS").exists)
    stop(process, signal.SIGTERM)
    submit(workers, output, ASKS[ask])
    names: set[str] = set()
    for name in ("first", "second"):
        process = start(workers, name)
        wait_until(lambda but=frozenset(names): entries(output) - but)  # of another execution
        stop(process, number)
        names |= entries(output)
    last = start(workers, "last")
    wait_until((output / "_SUCCESS").exists)
    stop(last, signal.SIGTERM)
    assert answers(output) == answers(calm)
    found, expected = (json.loads((each / "_manifest.json").read_text()) for each in (output, calm))
    assert found["generated_tokens"] + found["tokens_resumed"] == expected["generated_tokens"]
    assert (expected["rows_resumed"], expected["tokens_resumed"]) == (0, 0)
    assert min(found["rows_resumed"], found["tokens_resumed"]) > 0
    assert not (output / "_journal").exists()
    if number == signal.SIGTERM:  # nothing was computed twice
        computed = [
            stats_of(workers, name)["generation_tokens"] for name in ("first", "second", "last")
        ]
        assert sum(computed) == stats_of(workers, "calm")["generation_tokens"]


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.long)]
)
def test_a_long_answer_goes_on_where_it_was(workers: RealWorkers, number: signal.Signals) -> None:
    asked: dict[str, Any] = {**DRAWN, "n": 2, "max_tokens": 400}
    queue = workers.queue("bulk")
    calm = queue.enqueue("jobs.complete", "On a day ", **asked)
    start(workers, "calm", TOKENMILL_JOURNAL_S="0")
    expected = workers.result(calm).return_value
    stop(workers.processes[-1], signal.SIGTERM)
    job = queue.enqueue("jobs.complete", "On a day ", **asked)
    process = start(workers, "first")
    key = f"tokenmill:journal:{job.id}"
    wait_until(lambda: workers.redis.exists(key))
    stop(process, number)
    start(workers, "last")
    found = workers.result(job).return_value
    assert [each["text"] for each in found["choices"]] == [
        each["text"] for each in expected["choices"]
    ]
    assert found["usage"]["completion_tokens"] == expected["usage"]["completion_tokens"]
    assert not workers.redis.exists(key)
    stop(workers.processes[-1], signal.SIGTERM)
    if number == signal.SIGTERM:
        computed = [stats_of(workers, name)["generation_tokens"] for name in ("first", "last")]
        assert sum(computed) == stats_of(workers, "calm")["generation_tokens"]
    else:
        assert (
            stats_of(workers, "last")["generation_tokens"]
            < stats_of(workers, "calm")["generation_tokens"]
        )
