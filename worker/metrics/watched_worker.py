"""A worker as its metrics tell of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from jobs.watch.samples import Point
from worker.metrics.tally import Tally


@dataclass(frozen=True)
class Shown:
    """What a worker last showed of itself in Redis. queued: jobs of each queue by status. held: by queue and
    kind, "function" or "engine"."""

    state: str
    point: Point = field(default_factory=Point)
    queued: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    held: Mapping[tuple[str, str], int] = field(default_factory=dict)


class Reporting(Protocol):
    """What the I/O thread last showed of the worker, and the engine's counters after its last step."""

    shown: Shown
    engine_stats: Mapping[str, Any]


@dataclass(frozen=True)
class WatchedWorker:
    """Whose numbers they are, and where they are read. facts: as in the worker's key."""

    facts: Mapping[str, Any]
    queue_names: Sequence[str]
    counts: Tally
    reporter: Reporting
