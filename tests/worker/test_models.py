"""Workers that serve different models share a queue."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from jobs.errors import ModelNotServed
from jobs.runs.control import submit_run
from jobs.runs.watching.snapshot import read_snapshot
from tests.rq_workers import Workers, stats_of, wait_until


def submit(workers: Workers, folder: Path, model: str) -> str:
    pq.write_table(pa.table({"prompt": [f"p{number}" for number in range(300)]}), folder / "in.parquet")
    return submit_run(
        workers.redis, "bulk", input=str(folder / "in.parquet"), output=str(folder / "out"), model=model
    )


def test_a_run_is_planned_and_scored_by_the_model_that_it_names(workers: Workers, tmp_path: Path) -> None:
    workers.start("--name", "serves-a", TOKENMILL_MODEL="a", TOKENMILL_DATA_ROOTS=str(tmp_path))
    run = submit(workers, tmp_path, model="b")
    other = workers.queue("bulk").enqueue("jobs.complete", "behind the run", max_tokens=1)
    assert workers.result(other).return_value["model"] == "a", "what waits for b does not hold a up"
    assert read_snapshot(workers.redis, run).awaited_model == "b"
    assert workers.queue("bulk").job_ids == [f"{run}-plan"], "left in its place"

    workers.start("--name", "serves-b", TOKENMILL_MODEL="b", TOKENMILL_DATA_ROOTS=str(tmp_path))
    wait_until(lambda: read_snapshot(workers.redis, run).finished)
    manifest = json.loads((tmp_path / "out" / "_manifest.json").read_text())
    assert (manifest["rows"], manifest["model"]) == (300, "b")
    assert manifest["fingerprint"] == "fingerprint of b"
    facts = stats_of(workers, "serves-a")
    assert facts["models"] == ["fingerprint of a", "a"]
    assert (facts["dtype"], facts["attention_backend"]) == ("auto", "none")


def test_a_prompt_for_a_model_that_is_not_served_fails_with_the_served_name(workers: Workers) -> None:
    job = workers.queue("bulk").enqueue("jobs.complete", "x", model="b")
    workers.burst(TOKENMILL_MODEL="a")
    result = workers.result(job)
    assert ModelNotServed.__name__ in result.exc_string
    assert "serves 'a'" in result.exc_string
