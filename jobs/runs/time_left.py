"""How long a run goes on, from what Redis knows of its shards."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import isfinite

from .eta import Done, Extent, Running, seconds_left
from .part_stats import PartStats
from .plan import MAX_SHARDS
from .shard_sizes import ShardSizes


@dataclass(frozen=True)
class Progress:
    """What a shard's running job says of it.

    rows: that are answered. tokens: generated. rows_open: being answered. shard_rows: all. started_at: Unix
    seconds. worker: the name of whose it is.
    """

    rows: int
    tokens: int
    rows_open: int = 0
    shard_rows: int = 0
    started_at: float | None = None
    worker: str = ""


def time_left(
    sizes_text: str | None,
    shards: int | None,
    rows: int | None,
    parts: Mapping[int, PartStats],
    running: Mapping[int, Progress],
    now: float,
) -> float | None:
    """Return how many seconds are left to a run; None where nothing tells.

    sizes_text: what its planning has stored. shards, rows: of the run. parts: recorded ones. running: shards
    under way. now: Unix seconds.
    """
    if not shards or rows is None or shards > MAX_SHARDS:
        return None
    sizes = ShardSizes()
    with suppress(ValueError, RecursionError):
        sizes = ShardSizes.from_value(json.loads(sizes_text or ""))
    if sizes.each * len(sizes.rows) < shards:
        left = max(0, rows - sum(part.rows for part in parts.values())) / max(1, shards - len(parts))
        sizes = ShardSizes(shards, (round(left * shards),), (round(left * shards),))

    def extent(shard: int, rows: float | None = None) -> Extent:
        known = sizes.rows_of(shard)
        size = sizes.size_of(shard)
        if rows is None or known <= 0:
            return Extent(known if rows is None else rows, size)
        return Extent(rows, size * rows / known if sizes.each > 1 else size)

    done = [
        Done(extent(shard, part.rows), part.started_at, part.ended_at, part.worker)
        for shard, part in parts.items()
        if _is_moment(part.started_at) and _is_moment(part.ended_at)
    ]
    under_way = [
        Running(
            extent(shard, each.shard_rows or None), each.started_at, each.worker, each.rows, each.rows_open
        )
        for shard, each in running.items()
        if each.started_at is not None
    ]
    waiting = [extent(shard) for shard in range(shards) if shard not in parts and shard not in running]
    return seconds_left(done, under_way, waiting, now)


def _is_moment(value: object) -> bool:
    """Whether a recorded time is one: others may write into Redis."""
    return isinstance(value, (int, float)) and isfinite(value) and 0 <= value < 1 << 53
