"""A run whose input grows, for tests of `--extend`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from redis import Redis

from jobs.context import JobContext
from jobs.watch.runs import list_runs
from tests.jobs.answering import (
    FakeCompletion,
    queued_jobs,
    score_parquet,
    shout,
    work_off,
)

MakeContext = Callable[[], JobContext]


class GrowingRun:
    """A folder of input files, and the run of them."""

    def __init__(self, redis: Redis, make_context: MakeContext, folder: Path, **arguments: Any) -> None:
        self.redis, self.make_context = redis, make_context
        self.input, self.output = folder / "in", folder / "out"
        self.input.mkdir(parents=True)
        self.arguments = {"rows_per_shard": 2, "sampling": {"seed": 1}, **arguments}

    def parquet(self, name: str, *ids: int) -> Path:
        path = self.input / name
        path.parent.mkdir(exist_ok=True)
        pq.write_table(pa.table({"prompt": [f"p{each}" for each in ids], "id": ids}), path)
        return path

    def lines(self, name: str, *ids: int) -> Path:
        """Write these rows behind those that are there."""
        path = self.input / name
        with path.open("a") as file:
            file.writelines(json.dumps({"prompt": f"p{each}", "id": each}) + "\n" for each in ids)
        return path

    def submit(self, extend: bool = False, **options: Any) -> dict[str, Any]:
        given = {"input": str(self.input), "output": str(self.output), **self.arguments, **options}
        return score_parquet(self.make_context(), **given, extend=extend)

    def work(self, answer: Callable[[Any], FakeCompletion] = shout) -> None:
        while queued_jobs(self.redis):
            work_off(self.redis, self.make_context, answer=answer)

    def run(self) -> None:
        self.submit()
        self.work()

    def extend(self) -> int:
        """Extend the run; return how many rows it has gained."""
        added: int = self.submit(extend=True)["rows_added"]
        self.work()
        return added

    @property
    def manifest(self) -> dict[str, Any]:
        return dict(json.loads((self.output / "_manifest.json").read_text()))

    def rows(self) -> list[dict[str, Any]]:
        parts = sorted(self.output.rglob("part-*.parquet"))
        return [row for part in parts for row in pq.ParquetFile(part).read().to_pylist()]

    def check(self, *ids: int) -> None:
        """The run has ended with these rows, in this order."""
        assert [(row["id"], row["completion"]) for row in self.rows()] == [(each, f"P{each}") for each in ids]
        assert (self.output / "_SUCCESS").is_file()
        assert self.manifest["rows"] == len(ids)
        (found,) = list_runs(self.redis)
        assert (found.state, found.rows_done, found.rows) == ("finished", len(ids), len(ids))
        assert not list(self.output.rglob("_tmp.*"))
