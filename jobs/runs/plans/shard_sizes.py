"""How many rows a run's shards have, and how much these ask: it tells more of the time they take."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

#: Numbers that are kept of a run, in its plan and in Redis.
MAX_SIZES = 500


@dataclass(frozen=True)
class ShardSizes:
    """Of so many shards together, one number after the other: sizes, in bytes of what they ask, and rows."""

    each: int = 1
    sizes: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()

    @classmethod
    def of(cls, sizes: Sequence[float], rows: Sequence[int]) -> ShardSizes:
        """Return what is kept of all shards, in their order."""
        each = max(1, -(-len(rows) // MAX_SIZES))
        starts = range(0, len(rows), each)
        return cls(
            each,
            tuple(round(sum(sizes[start : start + each])) for start in starts),
            tuple(sum(rows[start : start + each]) for start in starts),
        )

    @classmethod
    def from_value(cls, value: list[Any]) -> ShardSizes:
        """Read what `to_value` returned."""
        each, sizes, rows = value
        return cls(each, tuple(sizes), tuple(rows))

    def to_value(self) -> list[Any]:
        return [self.each, list(self.sizes), list(self.rows)]

    def to_text(self) -> str:
        return json.dumps(self.to_value())

    def size_of(self, shard: int) -> float:
        return self.sizes[shard // self.each] / self.each

    def rows_of(self, shard: int) -> float:
        return self.rows[shard // self.each] / self.each
