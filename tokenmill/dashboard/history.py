"""The last hour, for charts: how many jobs waited, and how fast tokens came, of all workers together."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from redis import Redis

from jobs.common.keys import samples_key
from jobs.common.stored import json_object
from jobs.common.workers import MAX_POINTS, Point

#: Width of a step of the charts, and how many there are.
STEP_S, NUM_STEPS = 10, 360

#: The fewest steps that a chart shows.
LEAST_STEPS = 60

#: Queues with a line of their own, those that were longest; the others are one line together.
MAX_LINES = 6

#: Counts that are summed up over the workers, as rates.
RATES = ("generation_tokens", "prompt_tokens", "cached_tokens")

#: About how many seconds a worker's rate is averaged over.
WINDOW_S = 12.0

#: Seconds between two points of a worker beyond which nothing is known of the time in between.
_MAX_GAP_S = 120.0


@dataclass
class _Step:
    depth: dict[str, int] = field(default_factory=dict)
    grown: dict[str, float] = field(default_factory=dict)


class History:
    """Adds up what workers report over time. One thread at a time may use it.

    Workers report about every ten seconds. The growth of a count is spread evenly over the time in between.
    """

    def __init__(self) -> None:
        self._steps: dict[int, _Step] = {}
        self._recent: dict[str, deque[Point]] = {}

    def knows(self, worker: str) -> bool:
        return worker in self._recent

    def forget(self, living: Iterable[str]) -> None:
        """Forget workers that are gone, except for what they have added."""
        self._recent = {name: self._recent[name] for name in living if name in self._recent}

    def add_point(self, worker: str, point: Point, at: float) -> None:
        """Add what a worker reported. at: Unix seconds by the charts' clock."""
        recent = self._recent.setdefault(worker, deque(maxlen=16))
        if recent:
            gap_s = point.at - recent[-1].at
            if gap_s <= 0:
                return
            if gap_s <= _MAX_GAP_S:
                self._spread(recent[-1], point, at - gap_s, at)
        recent.append(point)
        self._add_depth(point.depth, at)

    def add_depth(self, depth: Mapping[str, int], at: float) -> None:
        """Note how many jobs wait in each queue at a moment. This replaces an earlier note of that moment."""
        self._step(at).depth = dict(depth)
        newest = int(at // STEP_S)
        # Points in the future come from a worker with a wrong clock, or from an invented worker.
        for number in [
            number for number in self._steps if not newest - NUM_STEPS < number <= newest + 1
        ]:
            del self._steps[number]

    def rate(self, worker: str, name: str) -> float | None:
        """Return how fast a worker's count grows now; None if that is not known yet."""
        recent = self._recent.get(worker)
        if not recent or len(recent) < 2:
            return None
        last = recent[-1]
        within = [point for point in recent if last.at - point.at <= WINDOW_S and point is not last]
        return per_second(last, within[0] if within else recent[-2], name)

    def series(self, now: float) -> dict[str, Any]:
        """Return the charts' lines as JSON has them: `times` (Unix seconds), `depth` and `tokens`.

        The step that is under way has no rate yet, and the one before it only once workers have told of it.
        """
        last = int(now // STEP_S)
        first = min((number for number in self._steps if number > last - NUM_STEPS), default=last)
        numbers = range(
            min(first, last - LEAST_STEPS) if first <= last else last - LEAST_STEPS, last + 1
        )
        steps = [self._steps.get(number) for number in numbers]
        return {
            "times": [number * STEP_S for number in numbers],
            "depth": _lines(steps),
            "tokens": [
                {
                    "name": name,
                    "values": [
                        None
                        if step is None or number > last - 2
                        else round(step.grown.get(name, 0) / STEP_S, 1)
                        for number, step in zip(numbers, steps, strict=True)
                    ],
                }
                for name in RATES
            ],
        }

    def _step(self, at: float) -> _Step:
        return self._steps.setdefault(int(at // STEP_S), _Step())

    def _add_depth(self, depth: Mapping[str, int], at: float) -> None:
        known = self._step(at).depth
        for name, length in depth.items():
            known.setdefault(name, length)

    def _spread(self, older: Point, newer: Point, since: float, until: float) -> None:
        for name in RATES:
            grown = getattr(newer, name) - getattr(older, name)
            if grown <= 0:  # nothing, or a worker that was started anew
                continue
            for number in range(int(since // STEP_S), int(until // STEP_S) + 1):
                inside = min(until, (number + 1) * STEP_S) - max(since, number * STEP_S)
                if inside > 0:
                    step = self._steps.setdefault(number, _Step())
                    step.grown[name] = step.grown.get(name, 0) + grown * inside / (until - since)


def read_points(connection: Redis, names: Sequence[str]) -> dict[str, list[Point]]:
    """Return what workers have told in the last hour, the oldest first."""
    with connection.pipeline(transaction=False) as pipe:
        for name in names:
            pipe.lrange(samples_key(name), 0, MAX_POINTS - 1)
        replies = pipe.execute(
            raise_on_error=False
        )  # producers may have put another kind of value there
    points: dict[str, list[Point]] = {}
    for name, raws in zip(names, replies, strict=True):
        newest_first = raws if isinstance(raws, list) else []
        points[name] = [Point.from_object(json_object(raw)) for raw in reversed(newest_first)]
    return points


def per_second(newer: Point, older: Point, name: str) -> float | None:
    """Return how fast a count has grown between two points; None if the worker or its clock began anew."""
    seconds, grown = newer.at - older.at, getattr(newer, name) - getattr(older, name)
    return grown / seconds if seconds > 0 and grown >= 0 else None


def _lines(steps: list[_Step | None]) -> list[dict[str, Any]]:
    """Return a line for each of the queues that were longest, and one for the others together."""
    longest: dict[str, int] = {}
    for step in steps:
        for name, length in (step.depth if step else {}).items():
            longest[name] = max(length, longest.get(name, 0))
    names = sorted(longest, key=lambda name: (-longest[name], name))
    own, others = sorted(names[:MAX_LINES]), names[MAX_LINES:]
    lines = [{"name": name, "values": [_depth(step, [name]) for step in steps]} for name in own]
    if others:
        values = [_depth(step, others) for step in steps]
        lines.append({"name": f"{len(others)} other queues", "values": values})
    return lines


def _depth(step: _Step | None, names: list[str]) -> int | None:
    found = [step.depth[name] for name in names if name in step.depth] if step else []
    return sum(found) if found else None
