"""A worker as its metrics see it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from jobs.watch.samples import Point
from worker.metrics.tally import Tally


@dataclass(frozen=True)
class Shown:
    """A worker's last statistics. queued: by queue and status. held: by queue and kind, "function" or "engine"."""

    state: str
    point: Point = field(default_factory=Point)
    queued: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    held: Mapping[tuple[str, str], int] = field(default_factory=dict)


class Reporting(Protocol):
    """The statistics last shown by the I/O thread, and the engine's last counters."""

    shown: Shown
    engine_stats: Mapping[str, Any]


@dataclass(frozen=True)
class WatchedWorker:
    """A worker, and where to read its numbers. facts: as in the worker's key."""

    facts: Mapping[str, Any]
    queue_names: Sequence[str]
    counts: Tally
    reporter: Reporting
