"""When a run will end, from what its shards took so far. Pure functions of numbers.

A shard takes time for its rows and for what is in them, in a proportion that the finished ones tell. So rows
that are sorted by length, or of which few are long, do not mislead as a count of rows does. Of a shard under
way its tokens tell how much is done: the rows that are open at its end are the long ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from math import fsum
from statistics import median

from .shard_fit import Extent, Fit, Sample, Scale, fit
from .under_way import Running, Tokens, shares
from .worker_time import Held, Took, lingers, times

#: A worker that has ended a shard so many seconds ago is about to begin another.
LATELY_S = 2.0

#: Finished shards that are looked at, the last ones.
MAX_OBSERVED = 1000

#: Waiting shards of which each is given to a worker; those before them are divided among all.
MAX_QUEUED = 500


#: Share of a full step's time that one with few rows takes too. On a CPU it is little, on a GPU most.
FIXED = 0.25


@dataclass(frozen=True)
class Done:
    """A finished shard. Times are Unix seconds. worker: its name. tokens: of its rows, if that is known."""

    extent: Extent
    started_at: float
    ended_at: float
    worker: str
    tokens: Tokens | None = None


def seconds_left(
    done: Sequence[Done], running: Sequence[Running], waiting: Iterable[Extent], now: float
) -> float | None:
    """Return how long a run goes on if it does as it did lately; None where nothing tells.

    done: at least those of this submission. waiting: shards that no worker has begun. now: Unix seconds.
    """
    waiting = list(waiting)
    if not waiting and not running:
        return 0.0
    everything = [each.extent for each in done] + [each.extent for each in running] + waiting
    scale = Scale(
        fsum(each.rows for each in everything) or 1.0, fsum(each.size for each in everything) or 1.0
    )
    held_s = _held_s(done)
    per_row = _per_row(done, [each.extent for each in running], scale)
    done_of = shares(running, per_row, now, held_s)
    held = _observed(done, running, done_of, now, scale)
    took = times(held)
    half_life = max(1.0, (now - min((each.began_at for each in held), default=now)) / 2)
    weights = [0.5 ** (max(0.0, now - each.until) / half_life) for each in took]
    cost = fit(
        [Sample(one.rows, one.size, one.seconds, weight) for one, weight in zip(took, weights, strict=True)]
    )
    if cost is None:
        return None
    paces, linger_s = _paces(took, weights, cost), lingers(held)
    own: dict[str, float] = {}
    open_: dict[str, float] = {}
    for each, share in zip(running, done_of, strict=True):
        seconds = cost.at(*scale.of(each.extent)) * paces.get(each.worker, 1.0)
        own[each.worker] = own.get(each.worker, 0.0) + (1 - share) * seconds
        sent = max(share, each.sent)
        open_[each.worker] = open_.get(each.worker, 0.0) + (sent - share) * seconds
    for ended in done:
        if now - ended.ended_at < LATELY_S:
            own.setdefault(ended.worker, 0.0)
    if not own:
        return None
    costs = [cost.at(*scale.of(each)) for each in waiting]
    ends = _ends(own, paces, costs)
    return max(end + _runs_out(linger_s, open_.get(worker, 0.0)) for worker, end in ends.items())


def _runs_out(linger_s: float, open_s: float) -> float:
    """Return how much longer a batch takes that no row enters any more.

    linger_s: for which the rows of a shard stay open once all are sent. open_s: what is left of open rows at
    the speed of a full batch, and contained already. If steps took time for their rows alone, that would be
    all; if they took the same for few rows as for many, it would be linger_s.
    """
    return FIXED * max(0.0, linger_s - open_s)


def _per_row(done: Sequence[Done], extents: Sequence[Extent], scale: Scale) -> list[Tokens | None]:
    """Return what rows of these shards will have on average, as finished shards tell; None where none do."""
    known = [(*scale.of(each.extent), each.tokens) for each in done if each.tokens is not None]
    prompts = fit([Sample(rows, size, tokens.prompts) for rows, size, tokens in known])
    answers = fit([Sample(rows, size, tokens.answers) for rows, size, tokens in known])
    found: list[Tokens | None] = []
    for each in extents:
        of, rows = scale.of(each), max(1.0, each.rows)
        means = [tokens.at(*of) / rows if tokens is not None else 0.0 for tokens in (prompts, answers)]
        found.append(Tokens(*means) if known else None)
    return found


def _held_s(done: Sequence[Done]) -> float:
    """Return for how long the last shards were held; 0 where none is known."""
    lately = sorted(done, key=lambda each: each.ended_at)[-10:]
    return median([max(0.0, each.ended_at - each.started_at) for each in lately]) if lately else 0.0


def _ends(
    free: Mapping[str, float], paces: Mapping[str, float], costs: Sequence[float]
) -> Mapping[str, float]:
    """Return when each worker will have ended its last shard, each taking the next one when it is free.

    free: seconds until each worker is. costs: of the shards that wait, in their order.
    """
    first, last = costs[:-MAX_QUEUED], costs[-MAX_QUEUED:]
    together = fsum(1 / paces.get(worker, 1.0) for worker in free)
    level = (fsum(free.values()) + fsum(first)) / together if first else 0.0
    turns = [(max(level, at), worker) for worker, at in free.items()]
    heapify(turns)
    for cost in last:
        at, worker = turns[0]
        heapreplace(turns, (at + cost * paces.get(worker, 1.0), worker))
    return {worker: at for at, worker in turns}


def _observed(
    done: Sequence[Done], running: Sequence[Running], shares: Sequence[float], now: float, scale: Scale
) -> list[Held]:
    """Return the shards that are looked at, as their workers hold or held them."""
    lately = sorted(done, key=lambda each: each.ended_at)[-MAX_OBSERVED:]
    held = [Held(each.worker, each.started_at, each.ended_at, *scale.of(each.extent)) for each in lately]
    for each, share in zip(running, shares, strict=True):
        sent = max(share, each.sent)
        held.append(Held(each.worker, each.started_at, now, *scale.of(each.extent), sent, share, each.lead_s))
    return held


def _paces(took: Sequence[Took], weights: Sequence[float], cost: Fit) -> Mapping[str, float]:
    """Return how much longer than the fit each worker takes, 1 for one of which little is known."""
    sums: dict[str, tuple[float, float]] = {}
    for each, weight in zip(took, weights, strict=True):
        seconds, expected = sums.get(each.worker, (0.0, 0.0))
        own = cost.at(each.rows, each.size)
        sums[each.worker] = seconds + weight * each.seconds, expected + weight * own
    usual = fsum(expected for _, expected in sums.values()) / max(1, len(sums)) / 4
    return {
        worker: (seconds + usual) / (expected + usual) if expected + usual > 0 else 1.0
        for worker, (seconds, expected) in sums.items()
    }
