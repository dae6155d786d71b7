"""Runs whose files lie in an object store: what their tests share."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from jobs.context import JobContext
from jobs.parquet.files.storage import Storage
from jobs.parquet.planning.planner import plan_run
from jobs.runs.plans.spec import RunSpec
from jobs.runs.redis_state.submission import Submission
from tests.jobs.killing import finish, open_work
from tests.jobs.s3_server import BUCKET

ROOT = f"s3://{BUCKET}/data"


def in_store(context: JobContext, folder: Path) -> JobContext:
    """Return a context whose data roots are a folder and the store's."""
    return replace(context, data_roots=(str(folder.resolve()), ROOT), file_timeout_s=20.0)


def rows(count: int, letter: str = "p") -> pa.Table:
    return pa.table({"prompt": [f"{letter}{n}" for n in range(count)], "id": list(range(count))})


def whole_run(shards: int) -> set[str]:
    """Return the names of a finished run's files."""
    return {
        "_SUCCESS",
        "_manifest.json",
        "_plan.json",
        "_report.html",
        *(f"part-{n:05d}.parquet" for n in range(shards)),
        *(f"_keys/_part-{n:05d}.bin" for n in range(shards)),
    }


def run_all(
    context: JobContext, spec: RunSpec, storage: Storage | None = None, **wishes: Any
) -> dict[str, Any]:
    storage = storage or Storage.of(context)
    planned = plan_run(context, storage, spec, Submission("bulk", **wishes))
    for shard in range(planned["shards"]):
        finish(open_work(context, spec, shard, storage))
    return plan_run(context, storage, spec, Submission("bulk"))


def spec_of(source: Any, output: str = f"{ROOT}/out", **options: Any) -> RunSpec:
    return RunSpec.from_arguments(source, output, rows_per_shard=2, **options)
