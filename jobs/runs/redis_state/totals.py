"""What a run's parts have together, kept beside them in Redis: a list of runs need not read every part.

A worker that is killed between the two writes leaves a part uncounted, until planning or the end counts anew.
"""

from collections.abc import Iterable
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

#: All that is shown of these.
FIELDS = (*TOTALS, *OF_SUBMISSION, WORKED)


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
