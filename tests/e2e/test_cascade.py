"""Two models answer one run, each where its own worker takes its jobs."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tests.e2e.conftest import RealWorkers
from tests.rq_workers import leftovers, wait_until

ROWS = 60


def test_a_larger_model_answers_what_a_small_one_is_unsure_of(
    workers: RealWorkers, tmp_path: Path
) -> None:
    source = tmp_path / "in.parquet"
    pq.write_table(
        pa.table(
            {"id": range(ROWS), "text": [f"On day {row} of the year " for row in range(ROWS)]}
        ),
        source,
    )
    models = {"bulk": "float32", "large": "bfloat16"}
    for queue, dtype in models.items():
        workers.start("--name", queue, queues=(queue,), TOKENMILL_DTYPE=dtype)
    wait_until(lambda: all(workers.redis.exists(f"tokenmill:worker:{queue}") for queue in models))
    asked = {"prompt_column": "text", "labels": ["Monday", "Friday"], "rows_per_shard": 20}
    tables = {}
    for queue in models:
        workers.queue(queue).enqueue(
            "jobs.score_parquet", str(source), str(tmp_path / queue), **asked
        )
        wait_until((tmp_path / queue / "_SUCCESS").exists)
        tables[queue] = pq.read_table(tmp_path / queue)
    bound = sorted(tables["bulk"].column("margin").to_pylist())[ROWS // 3]
    both = {**asked, "escalate_below": bound, "escalate_to": "large"}
    workers.queue("bulk").enqueue("jobs.score_parquet", str(source), str(tmp_path / "out"), **both)
    wait_until((tmp_path / "out" / "_SUCCESS").exists)
    found = pq.read_table(tmp_path / "out")
    for row, margin in enumerate(tables["bulk"].column("margin").to_pylist()):
        queue = "large" if margin < bound else "bulk"
        (own,) = found.slice(row, 1).to_pylist()
        (expected,) = tables[queue].slice(row, 1).to_pylist()
        assert own["label"] == expected["label"]
        assert models[queue] in own["model"]
    manifest = json.loads((tmp_path / "out" / "_manifest.json").read_text())
    assert (manifest["rows"], manifest["errors"], manifest["rows_escalated"]) == (
        ROWS,
        0,
        ROWS // 3,
    )
    wait_until(lambda: not leftovers(workers.redis, *models))
    assert not workers.redis.exists(
        f"rq:job:{manifest['run']}-00000"
    )  # else nobody sees that the second one is gone
    assert workers.redis.exists(f"rq:job:{manifest['run']}-00000-2")
