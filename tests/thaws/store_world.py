"""The same run in an object store, of which each request is a call before which somebody may freeze."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import obstore
import pyarrow as pa
import pyarrow.parquet as pq
from obstore.store import MemoryStore
from redis import Redis

from jobs.parquet import object_files
from jobs.parquet.listing_child import listing
from jobs.runs.plans.names import part_name, part_shard
from jobs.runs.plans.spec import RunSpec
from tests.thaws.freezing import Freezer, Traced
from tests.thaws.world import ROWS, ROWS_PER_SHARD, World

ROOT = "s3://bucket/data"


class StoreWorld(World):
    """A World whose files are objects in the memory of this process."""

    traced = staticmethod(lambda freezer: traced_store(freezer))

    def __init__(self, redis: Redis, folder: Path) -> None:
        self.store = MemoryStore()
        self._opened = object_files.opened_store
        object_files.opened_store = lambda *_: self.store  # type: ignore[assignment]
        self._listed = object_files.listed
        object_files.listed = lambda kind, folder, _: listing(self.store, kind, folder.split("/", 3)[3])
        super().__init__(redis, folder)

    def place_files(self, folder: Path) -> None:
        self.put_rows("in/a.parquet", range(ROWS))
        self.data_root = ROOT
        self.arguments: dict[str, Any] = {
            "input": f"{ROOT}/in",
            "output": f"{ROOT}/out",
            "rows_per_shard": ROWS_PER_SHARD,
            "sampling": {"temperature": 0},
        }
        self.run = RunSpec.from_arguments(**self.arguments).run

    def put_rows(self, name: str, rows: range) -> None:
        file = io.BytesIO()
        table = pa.table({"prompt": [f"p{row}" for row in rows], "id": rows})
        pq.write_table(table, file, row_group_size=2)
        obstore.put(self.store, f"data/{name}", file.getvalue())

    def close(self) -> None:
        object_files.opened_store = self._opened
        object_files.listed = self._listed
        super().close()

    def names(self) -> set[str]:
        found = (each["path"] for page in obstore.list(self.store, "data/out") for each in page)
        return {path.removeprefix("data/out/") for path in found}

    def read(self, name: str) -> bytes:
        return bytes(obstore.get(self.store, f"data/out/{name}").bytes())

    def has_mark(self) -> bool:
        return "_SUCCESS" in self.names()

    def rows(self) -> list[dict[str, Any]]:
        parts = sorted(name for name in self.names() if part_shard(name) is not None)
        return [row for part in parts for row in pq.read_table(io.BytesIO(self.read(part))).to_pylist()]

    def add_input(self, rows: range) -> None:
        self.put_rows("in/b.parquet", rows)

    def remove_input(self) -> None:
        obstore.delete(self.store, "data/in/b.parquet")

    def delete_part(self, shard: int = 1) -> None:
        obstore.delete(self.store, f"data/out/{part_name(shard)}")

    def damage_part(self, shard: int = 1) -> None:
        self.is_damaged = True
        content = self.read(part_name(shard))
        obstore.put(self.store, f"data/out/{part_name(shard)}", content[: len(content) // 2])


@contextmanager
def traced_store(freezer: Freezer) -> Iterator[None]:
    """Make every request to a store one that freezes."""
    real = object_files.obstore
    object_files.obstore = Traced(real, freezer, set(), "obstore")  # type: ignore[assignment]
    try:
        yield
    finally:
        object_files.obstore = real
