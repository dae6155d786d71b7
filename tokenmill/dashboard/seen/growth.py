"""Computes how fast the counts of workers grow, from two points of each worker."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from redis import Redis

from jobs.common.keys import samples_key
from jobs.common.stored import json_object
from jobs.common.workers import MAX_POINTS, Point

#: The most seconds over which a current rate is averaged, if a worker reports that often.
WINDOW_S = 12.0

#: The most seconds between two points of a worker from which a growth is computed.
MAX_GAP_S = 120.0

#: The most points of a worker that are remembered.
MAX_RECENT = 16


@dataclass(frozen=True)
class QueueGrowth:
    """How fast a worker's counts of one queue grow, per second.

    ended: jobs that ended. failed: how many of these did not finish successfully. waited_s, ran_s: the sum of the
    seconds that the ended jobs waited and ran.
    """

    ended: float = 0.0
    failed: float = 0.0
    waited_s: float = 0.0
    ran_s: float = 0.0


@dataclass(frozen=True)
class Growth:
    """How fast a worker's counts grow, per second.

    tokens: generated tokens, tokens of prompts, and cached tokens. queues: the counts of each queue that the worker
    serves, by the queue's name.
    """

    tokens: tuple[float, float, float]
    queues: Mapping[str, QueueGrowth] = field(default_factory=dict)


def growth(older: Point, newer: Point) -> Growth | None:
    """Return how fast a worker's counts have grown between two points.

    Return None if the points are too far apart, or if the worker or its clock was restarted between them.
    """
    seconds = newer.at - older.at
    if seconds > MAX_GAP_S:
        return None
    generated = per_second(newer, older, "generation_tokens")
    prompt = per_second(newer, older, "prompt_tokens")
    cached = per_second(newer, older, "cached_tokens")
    if generated is None or prompt is None or cached is None:
        return None

    queues = {}
    for queue in newer.depth:
        queues[queue] = QueueGrowth(
            ended=_increase(newer.ended, older.ended, queue) / seconds,
            failed=_increase(newer.ended_badly, older.ended_badly, queue) / seconds,
            waited_s=_increase(newer.waited_ms, older.waited_ms, queue) / 1000 / seconds,
            ran_s=_increase(newer.ran_ms, older.ran_ms, queue) / 1000 / seconds,
        )
    return Growth((generated, prompt, cached), queues)


def _increase(newer: Mapping[str, int], older: Mapping[str, int], queue: str) -> int:
    """Return by how much a queue's count has increased; 0 if it has decreased."""
    return max(0, newer.get(queue, 0) - older.get(queue, 0))


def per_second(newer: Point, older: Point, count: str) -> float | None:
    """Return how fast a count has grown between two points; None if the worker or its clock was restarted between them.

    count: the name of a field of Point.
    """
    seconds = newer.at - older.at
    increase: float = getattr(newer, count) - getattr(older, count)
    if seconds <= 0 or increase < 0:
        return None
    return increase / seconds


class Rates:
    """The current rates of living workers, from their last points. For one thread at a time."""

    def __init__(self) -> None:
        self._recent: dict[str, deque[Point]] = {}

    def knows(self, worker: str) -> bool:
        """Whether `add` has remembered a point of this worker."""
        return worker in self._recent

    def keep_only(self, workers: Iterable[str]) -> None:
        """Forget all workers but these."""
        self._recent = {name: self._recent[name] for name in workers if name in self._recent}

    def add(self, worker: str, point: Point) -> None:
        """Remember a point of a worker, if it is newer than the last remembered point."""
        recent = self._recent.setdefault(worker, deque(maxlen=MAX_RECENT))
        if not recent or point.at > recent[-1].at:
            recent.append(point)

    def rate(self, worker: str, count: str) -> float | None:
        """Return how fast a worker's count grows now, per second; None if that is not known yet.

        count: the name of a field of Point.
        """
        recent = self._recent.get(worker)
        if not recent or len(recent) < 2:
            return None
        # From the earliest point of the last WINDOW_S. If there is none, from the point before the last one.
        *earlier, last = recent
        first = earlier[-1]
        for point in earlier:
            if last.at - point.at <= WINDOW_S:
                first = point
                break
        return per_second(last, first, count)


def read_points(
    connection: Redis, names: Sequence[str], most: int = MAX_POINTS
) -> dict[str, list[Point]]:
    """Return the latest points of each worker, at most `most`, the oldest first."""
    with connection.pipeline(transaction=False) as pipe:
        for name in names:
            pipe.lrange(samples_key(name), 0, most - 1)
        # A key may hold a value of another type, which a producer has written.
        replies: list[Any] = pipe.execute(raise_on_error=False)
    points: dict[str, list[Point]] = {}
    for name, reply in zip(names, replies, strict=True):
        newest_first = reply if isinstance(reply, list) else []
        points[name] = [Point.from_object(json_object(entry)) for entry in reversed(newest_first)]
    return points
