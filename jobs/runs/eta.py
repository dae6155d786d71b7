"""When a run will end, from what its shards took so far. Pure functions of numbers.

A shard takes time for its rows and for what is in them, in a proportion that the finished ones tell. So rows
that are sorted by length, or of which few are long, do not mislead as a count of rows does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from math import fsum
from statistics import median

#: A worker that has ended a shard so many seconds ago is about to begin another.
LATELY_S = 2.0

#: Finished shards that are looked at, the last ones.
MAX_OBSERVED = 1000

#: Waiting shards of which each is given to a worker; those before them are divided among all.
MAX_QUEUED = 500

#: Of the time for which a shard is held longer than it costs: the last one of a run shares its worker with
#: none behind it.
STRETCH = 0.5


@dataclass(frozen=True)
class Extent:
    """What is known of a shard before it is computed. size: bytes of what its rows ask, or whatever is
    proportional to it; its rows where nothing is known."""

    rows: float
    size: float


@dataclass(frozen=True)
class Done:
    """A finished shard. Times are Unix seconds. worker: its name."""

    extent: Extent
    started_at: float
    ended_at: float
    worker: str


@dataclass(frozen=True)
class Running:
    """A shard under way. rows_done: that have their answer. rows_open: that are being answered."""

    extent: Extent
    started_at: float
    worker: str
    rows_done: int
    rows_open: int = 0

    def share(self, now: float, held_s: float) -> float:
        """Return how much of its work is done. held_s: for which shards are held.

        A row that is being answered is half done, on average; but in the beginning none is.
        """
        age = max(0.0, now - self.started_at)
        half = min(1.0, 4 * age / held_s) / 2 if held_s > 0 else 0.5
        return min(1.0, (self.rows_done + half * self.rows_open) / max(1.0, self.extent.rows))


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
    scale = _Scale(
        fsum(each.rows for each in everything) or 1.0, fsum(each.size for each in everything) or 1.0
    )
    held_s = _held_s(done)
    shares = [each.share(now, held_s) for each in running]
    observed = _observed(done, running, shares, now, scale)
    fit = _fit(observed)
    if fit is None:
        return None
    paces, stretch = _paces(observed, fit), _stretch(observed, fit)
    own: dict[str, float] = {}
    latest = 0.0
    for each, share in zip(running, shares, strict=True):
        pace, seconds = paces.get(each.worker, 1.0), fit.seconds(*scale.of(each.extent))
        own[each.worker] = own.get(each.worker, 0.0) + (1 - share) * seconds * pace
        latest = max(latest, min(0.0, each.started_at - now) + seconds * pace * stretch)
    for ended in done:
        if now - ended.ended_at < LATELY_S:
            own.setdefault(ended.worker, 0.0)
    if not own:
        return None
    costs = [fit.seconds(*scale.of(each)) for each in waiting]
    return max(latest, _last_end(own, paces, costs, stretch))


def _held_s(done: Sequence[Done]) -> float:
    """Return for how long the last shards were held; 0 where none is known."""
    lately = sorted(done, key=lambda each: each.ended_at)[-10:]
    return median([max(0.0, each.ended_at - each.started_at) for each in lately]) if lately else 0.0


def _last_end(
    free: Mapping[str, float], paces: Mapping[str, float], costs: Sequence[float], stretch: float
) -> float:
    """Return when the last worker will have ended its last shard, each taking the next one when it is free.

    free: seconds until each worker is. costs: of the shards that wait, in their order. stretch: how much
    longer a shard is held than it costs.
    """
    first, last = costs[:-MAX_QUEUED], costs[-MAX_QUEUED:]
    together = fsum(1 / paces.get(worker, 1.0) for worker in free)
    level = (fsum(free.values()) + fsum(first)) / together if first else 0.0
    turns = [(max(level, at), worker) for worker, at in free.items()]
    heapify(turns)
    end = max(free.values())
    for cost in last:
        at, worker = turns[0]
        took = cost * paces.get(worker, 1.0)
        heapreplace(turns, (at + took, worker))
        end = max(end, at + took * stretch)
    return max(end, *(at for at, _ in turns))


def _stretch(observed: Sequence[_Observed], fit: _Fit) -> float:
    """Return how much longer a worker holds a shard than the shard costs, as it holds others beside it."""
    held = fsum(each.weight * each.held_s for each in observed)
    took = fsum(each.weight * each.seconds for each in observed)
    return 1 + STRETCH * max(0.0, held / took - 1) if took > 0 else 1.0


@dataclass(frozen=True)
class _Scale:
    """A run's rows and size, of which each shard is a share."""

    rows: float
    size: float

    def of(self, extent: Extent, share: float = 1.0) -> tuple[float, float]:
        return share * extent.rows / self.rows, share * extent.size / self.size


@dataclass(frozen=True)
class _Observed:
    """What a worker took for shares of the run's rows and size, and for how long it held them.

    weight: more for what was lately.
    """

    worker: str
    rows: float
    size: float
    seconds: float
    held_s: float
    weight: float


@dataclass(frozen=True)
class _Fit:
    """Seconds of one worker for all of a run's rows, and for all of its size."""

    rows_s: float
    size_s: float

    def seconds(self, rows: float, size: float) -> float:
        return rows * self.rows_s + size * self.size_s


def _observed(
    done: Sequence[Done], running: Sequence[Running], shares: Sequence[float], now: float, scale: _Scale
) -> list[_Observed]:
    """Return what workers took for shards.

    Those that one holds at a time share its time, by how much was done of each and in how long.
    """
    lately = sorted(done, key=lambda each: each.ended_at)[-MAX_OBSERVED:]
    starts = [each.started_at for each in lately] + [each.started_at for each in running]
    begun = min(starts, default=now)
    half_life = max(1.0, (now - begun) / 2)
    held: dict[str, list[_Held]] = {}
    for each in lately:
        held.setdefault(each.worker, []).append(
            _Held(each.started_at, max(each.started_at, each.ended_at), *scale.of(each.extent))
        )
    for one, share in zip(running, shares, strict=True):
        if share > 0:
            extent = scale.of(one.extent, share)
            held.setdefault(one.worker, []).append(_Held(one.started_at, max(one.started_at, now), *extent))
    return [
        _Observed(
            worker,
            each.rows,
            each.size,
            seconds,
            each.ended_at - each.began_at,
            0.5 ** (max(0.0, now - each.ended_at) / half_life),
        )
        for worker, ones in held.items()
        for each, seconds in zip(ones, _shared_time(ones), strict=True)
    ]


@dataclass(frozen=True)
class _Held:
    """A shard, or what is done of it, while a worker held it."""

    began_at: float
    ended_at: float
    rows: float
    size: float


def _shared_time(held: Sequence[_Held]) -> list[float]:
    """Return how much of the time in which a worker held anything each shard took."""
    events = sorted(
        [(each.began_at, True, number) for number, each in enumerate(held)]
        + [(each.ended_at, False, number) for number, each in enumerate(held)]
    )
    rates = [(each.rows + each.size) / max(1e-3, each.ended_at - each.began_at) for each in held]
    found, now, active = [0.0] * len(held), 0.0, set[int]()
    for moment, begins, number in events:
        if active and moment > now:
            together = fsum(rates[each] for each in active)
            for each in active:
                found[each] += (moment - now) * rates[each] / together if together else 0.0
        now = moment
        if begins:
            active.add(number)
        else:
            active.discard(number)
    return found


def _fit(observed: Sequence[_Observed]) -> _Fit | None:
    """Return what fits best by least squares, drawn to equal parts while little is known."""
    shares = fsum(each.weight * (each.rows + each.size) for each in observed)
    seconds = fsum(each.weight * each.seconds for each in observed)
    if shares <= 0 or seconds <= 0:
        return None
    middle = seconds / shares
    # Weighted by the inverse of what is expected: an end that is off by a second is so for any shard.
    each = [(one.weight / (one.rows + one.size), one) for one in observed if one.rows + one.size > 0]
    pull = fsum(weight * (one.rows + one.size) ** 2 for weight, one in each) / (4 * len(each))
    a = fsum(weight * one.rows * one.rows for weight, one in each) + pull
    b = fsum(weight * one.rows * one.size for weight, one in each)
    c = fsum(weight * one.size * one.size for weight, one in each) + pull
    p = fsum(weight * one.rows * one.seconds for weight, one in each) + pull * middle
    q = fsum(weight * one.size * one.seconds for weight, one in each) + pull * middle
    determinant = a * c - b * b
    rows_s, size_s = (p * c - q * b) / determinant, (q * a - p * b) / determinant
    if rows_s < 0:
        return _Fit(0.0, q / c)
    if size_s < 0:
        return _Fit(p / a, 0.0)
    return _Fit(rows_s, size_s)


def _paces(observed: Sequence[_Observed], fit: _Fit) -> Mapping[str, float]:
    """Return how much longer than the fit each worker takes, 1 for one of which little is known."""
    sums: dict[str, tuple[float, float]] = {}
    for each in observed:
        seconds, expected = sums.get(each.worker, (0.0, 0.0))
        own = fit.seconds(each.rows, each.size)
        sums[each.worker] = seconds + each.weight * each.seconds, expected + each.weight * own
    usual = fsum(expected for _, expected in sums.values()) / max(1, len(sums)) / 4
    return {
        worker: (seconds + usual) / (expected + usual) if expected + usual > 0 else 1.0
        for worker, (seconds, expected) in sums.items()
    }
