"""How long a run goes on, from what Redis knows of its shards."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import fsum, isfinite
from typing import TypeGuard

from .computed_share import Computed, ComputedShare
from .eta import Done, seconds_left
from .part_stats import PartStats
from .plan import MAX_SHARDS
from .recorded_parts import SeenParts
from .shard_fit import Extent
from .shard_sizes import ShardSizes
from .under_way import Begun, Running, Tokens


@dataclass(frozen=True)
class Progress:
    """What a shard's running job says of it.

    rows: that are answered. tokens: generated, for open rows too. rows_open: being answered. shard_rows: all.
    started_at: Unix seconds. worker: the name of whose it is. begun: its tokens; None where none are told.
    opened_at: when its file was opened, Unix seconds.
    """

    rows: int
    tokens: int
    rows_open: int = 0
    shard_rows: int = 0
    started_at: float | None = None
    worker: str = ""
    begun: Begun | None = None
    opened_at: float | None = None


def time_left(
    sizes_text: str | None,
    shards: int | None,
    rows: int | None,
    parts: SeenParts,
    running: Mapping[int, Progress],
    now: float,
) -> float | None:
    """Return how many seconds are left to a run; None where nothing tells.

    sizes_text: what its planning has stored. shards, rows: of the run. parts: recorded ones. running: shards
    under way; those of a worker that was killed wait again. now: Unix seconds.
    """
    if not shards or rows is None or shards > MAX_SHARDS:
        return None
    sizes = _sizes(sizes_text, shards, rows, parts)
    finished = {
        shard: part
        for shard, part in parts.latest.items()
        if is_moment(part.started_at) and is_moment(part.ended_at)
    }
    done = [
        Done(
            _of_share(_extent(sizes, shard, part.rows), _share(part)),
            part.started_at,
            part.ended_at,
            part.worker,
            Tokens(part.prompt_tokens, part.completion_tokens),
        )
        for shard, part in finished.items()
    ]
    to_compute = _ToCompute(finished)
    under_way = [
        _running(sizes, shard, each, each.started_at, to_compute)
        for shard, each in sorted(running.items())
        if each.started_at is not None
    ]
    waiting = [
        to_compute.of_next(_extent(sizes, shard))
        for shard in range(shards)
        if shard not in parts.shards and shard not in running
    ]
    return seconds_left(done, under_way, waiting, now)


def _sizes(text: str | None, shards: int, rows: int, parts: SeenParts) -> ShardSizes:
    """Return the shards' rows and bytes as planning has stored them; else as if those left were equal."""
    sizes = ShardSizes()
    with suppress(ValueError, RecursionError):
        sizes = ShardSizes.from_value(json.loads(text or ""))
    if sizes.each * len(sizes.rows) < shards:
        left = max(0, rows - parts.counts["rows"]) / max(1, shards - len(parts.shards))
        sizes = ShardSizes(shards, (round(left * shards),), (round(left * shards),))
    return sizes


def _extent(sizes: ShardSizes, shard: int, rows: float | None = None) -> Extent:
    """Return how much a shard is, of as many rows as are said, else as planned."""
    known, size = sizes.rows_of(shard), sizes.size_of(shard)
    if rows is None or known <= 0:
        return Extent(known if rows is None else rows, size)
    return Extent(rows, size * rows / known if sizes.each > 1 else size)


class _ToCompute:
    """What shards have to compute themselves, the next one in the run's order at each call.

    Greedy rows that are equal are computed once, so the further a run is, the fewer of its rows are.
    """

    def __init__(self, finished: Mapping[int, PartStats]) -> None:
        self._computed = _computed(finished)
        self._place = fsum(part.rows for part in finished.values())

    def of_next(self, whole: Extent) -> Extent:
        """Return the part of a shard's extent that is computed."""
        self._place += whole.rows
        return _of_share(whole, self._computed.at(self._place - whole.rows / 2))


def _running(
    sizes: ShardSizes, shard: int, told: Progress, started_at: float, to_compute: _ToCompute
) -> Running:
    whole = _extent(sizes, shard, told.shard_rows or None)
    opened_at = min(started_at, told.opened_at or started_at)
    return Running(
        to_compute.of_next(whole),
        whole.rows,
        opened_at,
        told.worker,
        told.rows,
        told.rows_open,
        told.begun,
        started_at - opened_at,
    )


def _computed(parts: Mapping[int, PartStats]) -> ComputedShare:
    """Return how the share of rows goes on that have no answer yet, of a run with equal rows."""
    found, place = [], 0.0
    for part in sorted(parts.values(), key=lambda part: part.started_at):
        share = _share(part)
        found.append(Computed(place + part.rows / 2, share * part.rows, share))
        place += part.rows
    return ComputedShare.of(found)


def _share(part: PartStats) -> float:
    """Return which share of its answers a shard had to compute; the others were those of equal rows."""
    if not part.completion_tokens:
        return 1.0
    return min(1.0, part.generated_tokens / part.completion_tokens)


def _of_share(extent: Extent, share: float) -> Extent:
    return Extent(share * extent.rows, share * extent.size)


def is_moment(value: object) -> TypeGuard[float]:
    """Whether a recorded time is one: others may write into Redis."""
    return isinstance(value, (int, float)) and isfinite(value) and 0 <= value < 1 << 53
