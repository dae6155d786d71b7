"""How long a run goes on: what is left of its rows and bytes, at the rate at which they were done lately."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import exp, expm1, fsum

from jobs.runs.statistics.run_statistics import PartStats

#: A worker that has ended a shard so many seconds ago is about to begin another.
LATELY_S = 2.0


@dataclass(frozen=True)
class Progress:
    """What a shard's job says of itself: answered rows, generated tokens, all rows, when it began; if it is there."""

    rows: int
    tokens: int
    shard_rows: int = 0
    started_at: float | None = None
    worker: str = ""
    has_job: bool = True


@dataclass(frozen=True)
class PartsDone:
    """The shards that have a part, what is known of the last ones, and what all have together."""

    shards: Collection[int]
    latest: Mapping[int, PartStats]
    counts: Mapping[str, int]


@dataclass(frozen=True)
class Span:
    """What a worker did of a shard between two moments, in Unix seconds. work: in shares of the run."""

    worker: str
    began_at: float
    ended_at: float
    work: float


def time_left(
    shares_text: str | bytes | None,
    shards: int | None,
    rows: int | None,
    parts: PartsDone,
    running: Mapping[int, Progress],
    now: float,
) -> float | None:
    """Return the seconds left to a run by its shards' stored shares, its parts and running shards; None if unknown."""
    if not shards or rows is None:
        return None
    work = json.loads(shares_text or "[]")
    if len(work) < shards:
        work = [1] * shards  # as if all were equal
    spans = [
        Span(part.worker, part.started_at, part.ended_at, work[shard] * _share(vars(part)))
        for shard, part in parts.latest.items()
        if shard < shards
    ]
    new, new_later = _new_shares(parts.counts["rows"], _share(parts.counts), rows)
    left = [work[shard] for shard in range(shards) if shard not in parts.shards and shard not in running]
    for shard, told in running.items():
        if told.started_at is not None and shard < shards:
            done = min(1.0, told.rows / max(1, told.shard_rows))
            spans.append(Span(told.worker, told.started_at, now, work[shard] * done * new))
            left.append(work[shard] * (1 - done))
    return seconds_left(spans, fsum(left) * new_later, now)


def seconds_left(spans: Sequence[Span], work: float, now: float) -> float | None:
    """Return how long the workers that are at it take for `work`, at the rate of the last half of the run."""
    first = min((each.began_at for each in spans), default=now)
    rate = _rate(spans, (first + now) / 2) or _rate(spans, first)
    workers = {each.worker for each in spans if now - each.ended_at < LATELY_S}
    return work / rate / len(workers) if rate and workers else 0.0 if work <= 0 else None


def _rate(spans: Sequence[Span], since: float) -> float:
    """Return the work of one worker in a second, while it had shards; 0 where there was none."""
    work, busy_s, until = 0.0, 0.0, dict[str, float]()
    for each in sorted(spans, key=lambda each: each.began_at):
        began_at, ended_at = max(since, each.began_at), max(since, each.ended_at)
        lasted_s = each.ended_at - each.began_at
        work += each.work * max(0.0, ended_at - began_at) / lasted_s if lasted_s > 0 else 0.0
        busy_s += max(0.0, ended_at - max(began_at, until.get(each.worker, began_at)))
        until[each.worker] = max(ended_at, until.get(each.worker, ended_at))
    return work / busy_s if busy_s > 0 else 0.0


def _new_shares(rows: int, share: float, all_rows: int) -> tuple[float, float]:
    """Return which share of the next rows, and of all left, is new: of x rows of n texts n * (1 - exp(-x / n))."""
    if share >= 1 or not 0 < rows < all_rows:
        return 1.0, 1.0
    low, high = 0.0, 1 / max(share, 1e-9)  # of x / n
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if -expm1(-middle) > share * middle else (low, middle)
    more = low * (all_rows - rows) / rows
    return exp(-low), exp(-low) * -expm1(-more) / more if more > 0 else 1.0


def _share(counts: Mapping[str, int]) -> float:
    tokens = counts["completion_tokens"]
    return min(1.0, counts["generated_tokens"] / tokens) if tokens else 1.0
