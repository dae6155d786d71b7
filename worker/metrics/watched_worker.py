"""A worker as its metrics tell of it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jobs.watch.samples import Point
from worker.metrics.tally import Counts


@dataclass(frozen=True)
class Shown:
    """What a worker last showed of itself in Redis. queued: jobs of each queue by status. held: by queue and
    kind, "function" or "engine"."""

    state: str
    point: Point = field(default_factory=Point)
    queued: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    held: Mapping[tuple[str, str], int] = field(default_factory=dict)


@dataclass(frozen=True)
class WatchedWorker:
    """Whose numbers they are, and where they are read. facts: as in the worker's key.

    shown, engine_stats: the latest; both are called in any thread, and cheap.
    """

    facts: Mapping[str, Any]
    queue_names: tuple[str, ...]
    counts: Counts
    shown: Callable[[], Shown]
    engine_stats: Callable[[], Mapping[str, Any]]
