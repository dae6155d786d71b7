"""How long workers took for shards, of which each holds several at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import fsum

#: Shards that tell for how long rows stay open, the last ones.
MAX_LINGERS = 20


@dataclass(frozen=True)
class Held:
    """A shard while a worker holds it. Times are Unix seconds; ended_at: now, of one under way.

    rows, size: its shares of the run's. sent: share of it that has gone to the engine; share: that is done.
    lead_s: for which one under way lay open before its first row went.
    """

    worker: str
    began_at: float
    ended_at: float
    rows: float
    size: float
    sent: float = 1.0
    share: float = 1.0
    lead_s: float = 0.0


@dataclass(frozen=True)
class Took:
    """What a worker took for shares of the run's rows and size, until when."""

    worker: str
    rows: float
    size: float
    seconds: float
    until: float


def lingers(held: Sequence[Held]) -> float:
    """Return for how long shards are held, on average of the last ones, once their worker has begun another:
    then all of their rows are sent. 0 where nothing tells."""
    found = []
    for ones in _by_worker(held):
        until = [max(each.began_at, each.ended_at) for each in ones]
        found += [
            (end, max(0.0, end - after.began_at))
            for each, end, after in zip(ones, until, ones[1:], strict=False)
            if each.sent >= 1
        ]
    lately = [linger for _, linger in sorted(found)[-MAX_LINGERS:]]
    return fsum(lately) / len(lately) if lately else 0.0


def times(held: Sequence[Held]) -> list[Took]:
    """Return how much of the workers' time the shards took, or what was sent of them."""
    return [took for ones in _by_worker(held) for took in _of_worker(ones)]


def _by_worker(held: Sequence[Held]) -> list[list[Held]]:
    """Return the shards of each worker in the order in which they began."""
    of: dict[str, list[Held]] = {}
    for each in sorted(held, key=lambda each: each.began_at):
        of.setdefault(each.worker, []).append(each)
    return list(of.values())


def _of_worker(held: Sequence[Held]) -> list[Took]:
    """Return the same of one worker's shards, in the order in which they began.

    It begins a shard when the rows of those before it have made room: once its batch is full, from one
    beginning to the next it does the work of one shard, however long a few rows of it stay open. At first it
    begins shards in no time, until as much is sent and not done, or lies open before its turn, as now; but
    that is more time where rows are larger.
    """
    busy_until = list(accumulate((max(each.began_at, each.ended_at) for each in held), max))
    lead_s = min(held[-1].lead_s, busy_until[-1] - held[-1].began_at)
    next_began = [*(each.began_at for each in held[1:]), busy_until[-1] - lead_s]
    ends = [min(pair) for pair in zip(next_began, busy_until, strict=True)]
    seconds = [end - each.began_at for each, end in zip(held, ends, strict=True)]
    work = [each.rows + each.size for each in held]
    done = fsum(each.share * one for each, one in zip(held, work, strict=True))
    open_ = fsum((each.sent - each.share) * one for each, one in zip(held, work, strict=True))
    ahead_s = lead_s + (open_ * (fsum(seconds) + lead_s) / done if done > 0 else 0.0)
    large = [one / each.rows if each.rows > 0 else 1.0 for each, one in zip(held, work, strict=True)]
    grown = [after - before for before, after in pairwise((0.0, *large))]
    # What one shard more than the one before it has ahead, the one before it took, and the first its own.
    extra = [grown[0] + fsum(grown[1:2]), *grown[2:], 0.0][: len(held)]
    return [
        Took(
            each.worker,
            each.sent * each.rows,
            each.sent * each.size,
            max(0.0, took + ahead_s * more / large[-1]),
            end,
        )
        for each, took, more, end in zip(held, seconds, extra, ends, strict=True)
    ]
