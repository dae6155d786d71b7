"""Runs of files in a test's folder, planned and worked off in this process as workers would."""

import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from redis import Redis
from rq.job import Job

from jobs.context import JobContext
from jobs.tasks import OpenTask
from tests.jobs.answering import (
    Answer,
    feed,
    opened_task,
    queued_jobs,
    run_task,
    score_parquet,
    shout,
    work_off,
)


def flip_a_bit(path: Path, column: str) -> None:
    """Flip a bit of the last value in a dictionary of a Parquet file's column, so that it decodes as another one."""
    group = pq.read_metadata(path).row_group(0)
    chunks = [group.column(number) for number in range(group.num_columns)]
    (chunk,) = [each for each in chunks if each.path_in_schema.partition(".")[0] == column]
    written = bytearray(path.read_bytes())
    written[chunk.data_page_offset - 1] ^= 1
    path.write_bytes(written)


class Runs:
    """By default of `in.parquet` into `out`."""

    def __init__(self, redis: Redis, make_context: Callable[[], JobContext], folder: Path) -> None:
        self._redis, self.context = redis, make_context
        self.source, self.output = folder / "in.parquet", folder / "out"

    def write(self, prompts: list[str | None], row_group_size: int = 3, **columns: Any) -> Path:
        table = pa.table(
            {"prompt": pa.array(prompts, pa.string()), "id": range(len(prompts)), **columns}
        )
        pq.write_table(table, self.source, row_group_size=row_group_size)
        return self.source

    def plan(
        self, source: Any = None, output: Path | str | None = None, **arguments: Any
    ) -> dict[str, Any]:
        source = source or self.source
        named = source if isinstance(source, list) else str(source)
        return score_parquet(self.context(), named, str(output or self.output), **arguments)

    @property
    def jobs(self) -> list[Job]:
        """Those that wait."""
        return queued_jobs(self._redis)

    def run(self, job: Job, answer: Answer = shout) -> Any:
        """Run one shard; its job stays where it is."""
        return run_task(self.context(), job.func_name, *job.args, answer=answer, **job.kwargs)

    def answered(self, job: Job, answer: Answer = shout) -> OpenTask:
        """Open a shard, and answer all that it asks; its part is yet to be written."""
        task = opened_task(self.context(), job.func_name, job.args, job.kwargs)
        feed(task, answer)
        return task

    def work(self, answer: Answer = shout, but: Collection[str] = ()) -> list[Any]:
        """Run every job that waits, but those of some functions; return what each returned."""
        return work_off(self._redis, self.context, answer=answer, but=but)

    def score(
        self,
        source: Any = None,
        answer: Answer = shout,
        output: Path | None = None,
        **arguments: Any,
    ) -> pa.Table:
        """Plan a run and work it off to its end; return its output."""
        output = output or self.output
        self.plan(source, output, **arguments)
        self.work(answer)
        assert (output / "_SUCCESS").exists()
        return pq.read_table(output)

    def rows(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = pq.read_table(self.output).to_pylist()
        return found

    @property
    def manifest(self) -> dict[str, Any]:
        return dict(json.loads((self.output / "_manifest.json").read_text()))
