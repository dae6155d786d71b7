"""A run with several prompts for each row, on workers that are killed."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tests.rq_workers import Workers, stats_of, wait_until


def test_a_worker_killed_between_two_prompts_of_a_row_costs_no_answer(
    workers: Workers, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    table = pa.table({"text": ["a", "b", "c"], "file": [str(gate)] * 3})
    pq.write_table(table, tmp_path / "in.parquet")
    prompts = [
        {"name": "first", "template": "{text}"},
        {"name": "held", "template": "file:{file}", "sampling": {"max_tokens": 3}},
        {"name": "last", "template": "{first} {text} {held}"},
    ]
    planned = workers.queue("bulk").enqueue(
        "jobs.score_parquet",
        "in.parquet",
        "out",
        prompts=prompts,
        sampling={"max_tokens": 2, "temperature": 0},
        rows_per_shard=2,
    )
    roots = {"TOKENMILL_DATA_ROOTS": str(tmp_path)}
    killed = workers.start("--name", "w", **roots)
    wait_until(lambda: stats_of(workers, "w").get("completion_tokens") == 6)  # of the first prompts
    killed.kill()
    killed.wait()
    assert workers.result(planned, 1).return_value["shards"] == 2
    assert not list((tmp_path / "out").glob("part-*"))
    gate.touch()
    workers.start(**roots)
    wait_until(lambda: (tmp_path / "out" / "_SUCCESS").exists())
    rows = pq.read_table(tmp_path / "out").to_pylist()
    assert [row["first"] for row in rows] == ["echo:a", "echo:b", "echo:c"]
    assert [row["last"] for row in rows] == [f"echo:echo:{t} {t} echo:file:{gate}" for t in "abc"]
    assert [(row["completion_tokens"], row["error"]) for row in rows] == [(7, None)] * 3
