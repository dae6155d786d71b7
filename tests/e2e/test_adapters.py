"""Adapters behind a real worker: rows and calls have what jobs say with each of them; test_adapters.py of the engine
compares those with PEFT."""

import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from rq.job import JobStatus

from jobs.cli import main
from tests.e2e.conftest import MODEL, RealWorkers
from tests.engine.adapters import make_adapter
from tests.rq_workers import stats_of, text_of, wait_until

PROMPTS = ["3 March 1987 ->", "1 May 2001 ->", "12 June 1999 ->"]
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 8}


def test_a_job_a_run_and_its_rows_have_the_adapters_that_they_name(
    workers: RealWorkers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that comes while the worker runs too, and others once it has gone."""
    folder, stock = tmp_path / "adapters", tmp_path / "stock"
    for seed, name in enumerate(("early", "late")):
        make_adapter(stock / name, MODEL, seed=seed)
    folder.mkdir()
    shutil.copytree(stock / "early", folder / "early")
    workers.start(
        "--name", "w", queues=("bulk",), TOKENMILL_ADAPTERS=str(folder), TOKENMILL_DTYPE="float32",
        TOKENMILL_MAX_ADAPTERS="1",
    )  # fmt: skip
    queue = workers.queue("bulk")
    unknown = queue.enqueue("jobs.complete", PROMPTS[0], adapter="late", **GREEDY)
    wait_until(lambda: unknown.get_status(refresh=True) == JobStatus.FAILED)
    assert "no adapter 'late' on this worker; known are early" in (
        unknown.latest_result().exc_string  # type: ignore[union-attr]
    )

    shutil.copytree(stock / "late", folder / "late")
    wait_until(lambda: stats_of(workers, "w").get("adapters") == ["early", "late"])
    asked = {
        name: queue.enqueue("jobs.complete", PROMPTS, adapter=name, **GREEDY)
        for name in ("early", None, "late")
    }
    by_model = queue.enqueue("jobs.complete", PROMPTS[1], model="late", **GREEDY)
    expected = {
        name: [choice["text"] for choice in workers.result(job).return_value["choices"]]
        for name, job in asked.items()
    }
    assert len({tuple(each) for each in expected.values()}) == 3
    assert text_of(workers.result(by_model)) == expected["late"][1]

    rows = [(prompt, name) for prompt in PROMPTS for name in expected]
    prompts, names = map(list, zip(*rows, strict=True))
    pq.write_table(pa.table({"prompt": prompts, "who": names}), tmp_path / "in.parquet")
    monkeypatch.setenv("RQ_REDIS_URL", workers.url)

    def score(output: Path, *adapters: str) -> list[str]:
        files = [str(tmp_path / "in.parquet"), str(output)]
        sampling = ["--temperature", "0", "--max-tokens", "8", "--rows-per-shard", "4"]
        submitted = CliRunner().invoke(main, ["submit", *files, *sampling, *adapters])
        assert submitted.exit_code == 0, submitted.output
        wait_until((output / "_SUCCESS").exists)
        return [row["completion"] for row in pq.read_table(output).to_pylist()]

    assert score(tmp_path / "own", "--adapter-column", "who") == [
        expected[name][PROMPTS.index(prompt)] for prompt, name in rows
    ]
    (folder / "late").rename(tmp_path / "away")
    assert score(tmp_path / "one", "--adapter", "early") == [
        expected["early"][PROMPTS.index(prompt)] for prompt, _ in rows
    ]
