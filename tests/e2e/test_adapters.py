"""Adapters behind a real worker: jobs, rows and calls get what an engine says with each of them."""

import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from rq.job import JobStatus

from engine import Engine, EngineConfig, SamplingParams
from jobs.cli import main
from tests.e2e.conftest import MODEL, RealWorkers
from tests.engine.adapters import make_adapter
from tests.rq_workers import stats_of, text_of, wait_until

PROMPTS = ["3 March 1987 ->", "1 May 2001 ->", "12 June 1999 ->"]
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 8}


def answers_of(folder: Path) -> dict[str | None, list[str]]:
    """What an engine answers in float32, by adapter."""
    config = EngineConfig(str(MODEL), dtype="float32", kv_cache_bytes=1 << 24, adapters=str(folder))
    with Engine(config) as engine:
        return {
            name: [
                each.text
                for each in engine.generate(PROMPTS, SamplingParams(**GREEDY, adapter=name))
            ]
            for name in (None, "early", "late")
        }


def test_a_job_a_run_and_its_rows_have_the_adapters_that_they_name(
    workers: RealWorkers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that comes while the worker runs too, and others once it has gone."""
    folder, stock = tmp_path / "adapters", tmp_path / "stock"
    for seed, name in enumerate(("early", "late")):
        make_adapter(stock / name, MODEL, seed=seed)
    expected = answers_of(stock)
    assert len({tuple(each) for each in expected.values()}) == 3
    folder.mkdir()
    shutil.copytree(stock / "early", folder / "early")
    workers.start(
        "--name", "w", queues=("bulk",), TOKENMILL_ADAPTERS=str(folder), TOKENMILL_DTYPE="float32",
        TOKENMILL_MAX_ADAPTERS="1",
    )  # fmt: skip
    queue = workers.queue("bulk")

    early = queue.enqueue("jobs.complete", PROMPTS[0], adapter="early", **GREEDY)
    plain = queue.enqueue("jobs.complete", PROMPTS[0], **GREEDY)
    unknown = queue.enqueue("jobs.complete", PROMPTS[0], adapter="late", **GREEDY)
    assert text_of(workers.result(early)) == expected["early"][0]
    assert text_of(workers.result(plain)) == expected[None][0]
    wait_until(lambda: unknown.get_status(refresh=True) == JobStatus.FAILED)
    assert "no adapter 'late' on this worker; known are early" in (
        unknown.latest_result().exc_string  # type: ignore[union-attr]
    )

    shutil.copytree(stock / "late", folder / "late")
    wait_until(lambda: stats_of(workers, "w").get("adapters") == ["early", "late"])
    by_model = queue.enqueue("jobs.complete", PROMPTS[1], model="late", **GREEDY)
    assert text_of(workers.result(by_model)) == expected["late"][1]

    rows = [(prompt, name) for prompt in PROMPTS for name in ("early", None, "late")]
    prompts, names = map(list, zip(*rows, strict=True))
    pq.write_table(pa.table({"prompt": prompts, "who": names}), tmp_path / "in.parquet")
    monkeypatch.setenv("RQ_REDIS_URL", workers.url)

    def command(*arguments: str) -> str:
        result = CliRunner().invoke(main, arguments)
        assert result.exit_code == 0, result.output
        return result.output

    sampling = ("--temperature", "0", "--max-tokens", "8", "--rows-per-shard", "4")
    source, output = str(tmp_path / "in.parquet"), tmp_path / "out"
    command("submit", source, str(output), "--adapter-column", "who", *sampling)
    wait_until((output / "_SUCCESS").exists)
    found = pq.read_table(output).to_pylist()
    assert [row["completion"] for row in found] == [
        expected[name][PROMPTS.index(prompt)] for prompt, name in rows
    ]

    (folder / "late").rename(tmp_path / "away")
    wait_until(lambda: stats_of(workers, "w").get("adapters") == ["early"])
    command("submit", source, str(tmp_path / "two"), "--adapter", "early", *sampling)
    wait_until((tmp_path / "two" / "_SUCCESS").exists)
    assert [row["completion"] for row in pq.read_table(tmp_path / "two").to_pylist()] == [
        expected["early"][PROMPTS.index(prompt)] for prompt, _ in rows
    ]
