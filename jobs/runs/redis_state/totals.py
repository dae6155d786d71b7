"""What a run's parts have together, kept beside them in Redis: a list of runs need not read every part.

A worker that is killed between the two writes leaves a part uncounted, until planning or the end counts anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from redis import Redis
from redis.client import Pipeline

from jobs.runs.statistics.part_stats import COUNTED, PartStats
from jobs.runs.statistics.run_statistics import working_s

#: Fields of a run's hash. Rows, and those with an error, of the parts recorded since the last submission.
JUDGED = ("judged_rows", "judged_errors")

#: What else is of the last submission: its generated tokens, when work on it began and its last part ended.
OF_SUBMISSION = (*JUDGED, "judged_tokens", "began_at", "ended_at")

#: Fields of what all parts have.
TOTALS = tuple(f"total_{name}" for name in COUNTED)

#: For how long workers had shards of the run, whatever the submission, at the last count of all parts.
WORKED = "worked_s"

OF_TIME = ("began_at", "ended_at", WORKED)

#: All fields that `Totals.read` looks at.
FIELDS = (*TOTALS, *OF_SUBMISSION, WORKED)


@dataclass(frozen=True)
class Totals:
    """Counts of all parts, by the names of PartStats, and since the last submission, in Unix seconds."""

    rows: int
    errors: int
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    generated_tokens: int
    failed_checks: int
    cut: int
    rows_reused: int
    judged_rows: int
    judged_tokens: int
    began_at: float | None
    ended_at: float | None
    worked_s: float | None

    @classmethod
    def read(cls, facts: Mapping[str, str]) -> Totals:
        """Read them from a run's hash."""
        counts = {name: int(facts.get(f"total_{name}", 0)) for name in COUNTED}
        judged = {name: int(facts.get(name, 0)) for name in ("judged_rows", "judged_tokens")}
        began_at, ended_at, worked_s = (float(facts[name]) if name in facts else None for name in OF_TIME)
        return cls(**counts, **judged, began_at=began_at, ended_at=ended_at, worked_s=worked_s)


def add_part(pipe: Pipeline, key: str, stats: PartStats) -> None:
    """Add a part to the totals of the run's hash at `key`."""
    counts: dict[Any, Any] = {f"total_{name}": getattr(stats, name) for name in COUNTED}
    since = (stats.rows, stats.errors, stats.generated_tokens)
    counts.update(zip((*JUDGED, "judged_tokens"), since, strict=True))
    for name, count in counts.items():
        pipe.hincrby(key, name, count)
    pipe.hset(key, "ended_at", str(stats.ended_at))
    pipe.execute()


def store_totals(connection: Redis, key: str, parts: Iterable[PartStats]) -> None:
    """Store what all parts have together in the run's hash at `key`."""
    counts, spans = dict.fromkeys(COUNTED, 0), []
    for part in parts:
        spans.append((part.started_at, part.ended_at))
        for name in COUNTED:
            counts[name] += getattr(part, name)
    fields: dict[Any, Any] = {f"total_{name}": count for name, count in counts.items()}
    fields[WORKED] = str(working_s(spans))
    connection.hset(key, mapping=fields)
