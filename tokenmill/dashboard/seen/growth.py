"""What workers add to their counts in a second, as two of their points tell it."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from redis import Redis

from jobs.common.keys import samples_key
from jobs.common.stored import json_object
from jobs.common.workers import MAX_POINTS, Point

#: About how many seconds a worker's rate is averaged over.
WINDOW_S = 12.0

#: Seconds between two points of a worker beyond which nothing is known of the time in between.
MAX_GAP_S = 120.0

_TOKENS = ("generation_tokens", "prompt_tokens", "cached_tokens")


@dataclass(frozen=True)
class QueueGrowth:
    """What a worker adds in a second to a queue's jobs that ended, to those that did not finish, and to their times."""

    ended: float = 0.0
    badly: float = 0.0
    waited_s: float = 0.0
    ran_s: float = 0.0


@dataclass(frozen=True)
class Growth:
    """What a worker adds in a second. tokens: generated, read and cached ones. queues: by the queues that it serves."""

    tokens: tuple[float, float, float]
    queues: Mapping[str, QueueGrowth] = field(default_factory=dict)


def growth(older: Point, newer: Point) -> Growth | None:
    """Return what a worker has added between two points; None if nothing is known of the time in between."""
    if newer.at - older.at > MAX_GAP_S:
        return None
    rates = [per_second(newer, older, name) for name in _TOKENS]
    generated, read, cached = rates
    if generated is None or read is None or cached is None:
        return None
    seconds = newer.at - older.at
    queues = {}
    for name in newer.depth:
        counts = [
            max(0, now.get(name, 0) - before.get(name, 0)) / seconds
            for now, before in (
                (newer.ended, older.ended),
                (newer.ended_badly, older.ended_badly),
                (newer.waited_ms, older.waited_ms),
                (newer.ran_ms, older.ran_ms),
            )
        ]
        ended, badly, waited_ms, ran_ms = counts
        queues[name] = QueueGrowth(ended, badly, waited_ms / 1000, ran_ms / 1000)
    return Growth((generated, read, cached), queues)


def per_second(newer: Point, older: Point, name: str) -> float | None:
    """Return how fast a count has grown between two points; None if the worker or its clock began anew."""
    seconds = newer.at - older.at
    grown = getattr(newer, name) - getattr(older, name)
    return grown / seconds if seconds > 0 and grown >= 0 else None


class Rates:
    """Remembers the last points of living workers. One thread at a time may use it."""

    def __init__(self) -> None:
        self._recent: dict[str, deque[Point]] = {}

    def knows(self, worker: str) -> bool:
        """Whether a point of this worker is remembered."""
        return worker in self._recent

    def forget(self, living: Iterable[str]) -> None:
        """Forget workers that are gone."""
        self._recent = {name: self._recent[name] for name in living if name in self._recent}

    def add(self, worker: str, point: Point) -> None:
        """Remember what a worker reported, unless that is known already."""
        recent = self._recent.setdefault(worker, deque(maxlen=16))
        if not recent or point.at > recent[-1].at:
            recent.append(point)

    def rate(self, worker: str, name: str) -> float | None:
        """Return how fast a worker's count grows now; None if that is not known yet."""
        recent = self._recent.get(worker)
        if not recent or len(recent) < 2:
            return None
        last = recent[-1]
        within = [point for point in recent if last.at - point.at <= WINDOW_S and point is not last]
        return per_second(last, within[0] if within else recent[-2], name)


def read_points(
    connection: Redis, names: Sequence[str], most: int = MAX_POINTS
) -> dict[str, list[Point]]:
    """Return what workers have told in the last hour, the oldest first. most: the points of each, the latest ones."""
    with connection.pipeline(transaction=False) as pipe:
        for name in names:
            pipe.lrange(samples_key(name), 0, most - 1)
        # Producers may have put another kind of value there.
        replies: list[Any] = pipe.execute(raise_on_error=False)
    points: dict[str, list[Point]] = {}
    for name, raws in zip(names, replies, strict=True):
        newest_first = raws if isinstance(raws, list) else []
        points[name] = [Point.from_object(json_object(raw)) for raw in reversed(newest_first)]
    return points
