"""A shard that is taken up goes on where the worker before has left it, and answers as if nobody had."""

import json
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.parquet.files.storage import Storage
from jobs.parquet.outputs.plan_file import load_plan
from jobs.parquet.outputs.run_folder import RunFolder
from jobs.parquet.shards.shard_journal import ShardJournal
from jobs.runs.redis_state.state import RunState
from tests.e2e.conftest import RealWorkers
from tests.jobs.answering import MODEL
from tests.rq_workers import Process, stats_of, wait_until

ROWS = 12
DRAWN: dict[str, Any] = {"max_tokens": 160, "temperature": 4.0, "seed": 7, "ignore_eos": True}
ASKS: dict[str, dict[str, Any]] = {
    "two samples": {"prompt_column": "text", "sampling": {**DRAWN, "n": 2}},
    "a chain": {
        "prompts": [
            {"name": "first", "template": "{text}"},
            {"name": "second", "template": "{first} and {text}"},
            {"name": "third", "template": "{second} or {text}"},
        ],
        "sampling": {**DRAWN, "max_tokens": 60},
    },
    "checks": {
        "prompt_column": "text",
        "sampling": {**DRAWN, "max_tokens": 50},
        "check": {"regex": "never"},
        "max_attempts": 4,
    },
    "what goes on": {
        "prompt_column": "text",
        "sampling": {**DRAWN, "max_tokens": 40},
        "continue_on_length": True,
        "max_attempts": 4,
    },
}


def start(workers: RealWorkers, name: str, **settings: str) -> Process:
    quick = {"TOKENMILL_JOURNAL_S": "0.1", "TOKENMILL_DETERMINISTIC": "1", "TOKENMILL_DRAIN_S": "0"}
    return workers.start("--name", name, queues=("bulk",), **{**quick, **settings})


def submit(workers: RealWorkers, output: Path, ask: dict[str, Any]) -> None:
    source = output.parent / "in.parquet"
    table = pa.table({"id": range(ROWS), "text": [f"On day {row} of the year " for row in range(ROWS)]})
    pq.write_table(table, source)
    workers.queue("bulk").enqueue("jobs.score_parquet", str(source), str(output), **ask)


def answers(output: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pq.read_table(output).to_pylist()
    return [{name: value for name, value in row.items() if name != "cached_tokens"} for row in found]


def manifest(output: Path) -> dict[str, Any]:
    return dict(json.loads((output / "_manifest.json").read_text()))


def entries(output: Path) -> set[str]:
    return {path.name for path in (output / "_journal").glob("*.*")}


def wait_for_an_entry(output: Path, but: set[str]) -> None:
    """Return once another execution has told how far its rows are."""
    wait_until(lambda: any(".now." in name for name in entries(output) - but))


def tokens_kept(workers: RealWorkers, output: Path) -> int:
    """Return how many tokens the journal of the run's shard holds."""
    storage = Storage([str(workers.folder.resolve())])
    plan = load_plan(storage, str((output / "_plan.json").resolve()))
    folder = RunFolder(storage, plan, RunState(workers.redis, plan.run), "nobody")
    left = ShardJournal(folder, 0, replace(MODEL, fingerprint=plan.model.fingerprint)).read()
    return left.num_tokens + sum(each.num_tokens + each.length[1] for each in left.under_way.values())


@pytest.fixture
def undisturbed(workers: RealWorkers, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    output = tmp_path / "undisturbed"
    submit(workers, output, ASKS[request.param])
    start(workers, "calm", TOKENMILL_JOURNAL_S="0")
    wait_until((output / "_SUCCESS").exists)
    workers.processes[-1].send_signal(signal.SIGTERM)
    workers.processes[-1].wait(timeout=60)
    assert not (output / "_journal").exists()
    return output


@pytest.mark.parametrize(("undisturbed", "ask"), [(name, name) for name in ASKS], indirect=["undisturbed"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_it_goes_on_where_it_was(
    workers: RealWorkers, tmp_path: Path, undisturbed: Path, ask: str, number: signal.Signals
) -> None:
    output = tmp_path / "out"
    submit(workers, output, ASKS[ask])
    names: set[str] = set()
    for name in ("first", "second"):
        process = start(workers, name)
        wait_for_an_entry(output, but=names)
        names |= entries(output)
        process.send_signal(number)
        assert process.wait(timeout=60) == (0 if number == signal.SIGTERM else -number)
    kept = tokens_kept(workers, output)
    last = start(workers, "last")
    wait_until((output / "_SUCCESS").exists)
    last.send_signal(signal.SIGTERM)
    assert last.wait(timeout=60) == 0
    assert answers(output) == answers(undisturbed)
    found, expected = manifest(output), manifest(undisturbed)
    assert found["generated_tokens"] + found["tokens_resumed"] == expected["generated_tokens"]
    assert (expected["rows_resumed"], expected["tokens_resumed"]) == (0, 0)
    assert found["rows_resumed"] > 0
    assert found["tokens_resumed"] == kept > 0, "so a kill costs what was computed since the last entry"
    assert not (output / "_journal").exists()
    if number == signal.SIGTERM:  # nothing was computed twice
        computed = [stats_of(workers, name)["generation_tokens"] for name in ("first", "second", "last")]
        assert sum(computed) == stats_of(workers, "calm")["generation_tokens"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_long_answer_goes_on_where_it_was(workers: RealWorkers, number: signal.Signals) -> None:
    asked: dict[str, Any] = {**DRAWN, "n": 2, "max_tokens": 400}
    queue = workers.queue("bulk")
    calm = queue.enqueue("jobs.complete", "On a day ", **asked)
    start(workers, "calm", TOKENMILL_JOURNAL_S="0")
    expected = workers.result(calm).return_value
    workers.processes[-1].send_signal(signal.SIGTERM)
    workers.processes[-1].wait(timeout=60)
    job = queue.enqueue("jobs.complete", "On a day ", **asked)
    process = start(workers, "first")
    key = f"tokenmill:journal:{job.id}"
    wait_until(lambda: workers.redis.exists(key))
    process.send_signal(number)
    assert process.wait(timeout=60) == (0 if number == signal.SIGTERM else -number)
    start(workers, "last")
    found = workers.result(job).return_value
    assert [each["text"] for each in found["choices"]] == [each["text"] for each in expected["choices"]]
    assert found["usage"]["completion_tokens"] == expected["usage"]["completion_tokens"]
    assert not workers.redis.exists(key)
    workers.processes[-1].send_signal(signal.SIGTERM)
    workers.processes[-1].wait(timeout=60)
    if number == signal.SIGTERM:
        computed = [stats_of(workers, name)["generation_tokens"] for name in ("first", "last")]
        assert sum(computed) == stats_of(workers, "calm")["generation_tokens"]
    else:
        assert stats_of(workers, "last")["generation_tokens"] < stats_of(workers, "calm")["generation_tokens"]
