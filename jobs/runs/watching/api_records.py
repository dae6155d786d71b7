"""Records of the API servers in Redis: their batches, and the limits that made them refuse requests.

The dashboard and /metrics show these records. The servers do not need the records, because their batches lie in a
folder.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from redis import Redis

from jobs.common import stored
from jobs.common.display import safe_name
from jobs.common.keys import API_BATCHES_KEY, API_LIMITED_KEY, RUN_TTL_S
from jobs.runs.plans.names import is_run_id
from jobs.runs.watching.reading import read_run_list
from jobs.runs.watching.snapshot import RunSnapshot

#: OpenAI's states of a batch, by the states of its run.
_STATUS = {
    "planning": "validating",
    "not planned": "validating",
    "running": "in_progress",
    "ending": "finalizing",
    "finished": "completed",
    "expired": "expired",
    "failed": "failed",
    "stopped": "failed",
    "cancelled": "cancelled",
}
#: The states of batches that go on.
OPEN_STATUSES = ("validating", "in_progress", "finalizing")
#: The most batches that are read.
MAX_BATCHES = 5000
#: The most refusals that are read.
MAX_LIMITED = 200


def batch_status(snapshot: RunSnapshot) -> str:
    """Return OpenAI's word for the state of a run's batch."""
    status = _STATUS[snapshot.state]
    is_late = snapshot.deadline is not None and snapshot.deadline <= time.time()
    if status == "in_progress" and is_late:  # no row is begun any more
        return "finalizing"
    if status == "cancelled" and (snapshot.shards_started or snapshot.claimed):
        return "cancelling"
    return status


@dataclass(frozen=True)
class BatchRecord:
    """A batch as an API server has recorded it. Texts are safe to show. Times are Unix seconds."""

    id: str
    project: str
    run: str
    created_at: int
    expires_at: int


@dataclass(frozen=True)
class Limited:
    """A limit that made the server refuse a project's requests.

    limit: the code of the error that the project's client got. last_at: the time of the last refusal, in Unix seconds.
    """

    project: str
    limit: str
    last_at: float


def record_batch(connection: Redis, batch: BatchRecord) -> None:
    """Record a batch for as long as Redis keeps the batch's run."""
    with connection.pipeline(transaction=False) as pipe:
        pipe.zadd(API_BATCHES_KEY, {json.dumps(asdict(batch)): batch.created_at})
        pipe.zremrangebyscore(API_BATCHES_KEY, "-inf", batch.created_at - RUN_TTL_S)
        pipe.expire(API_BATCHES_KEY, RUN_TTL_S)
        pipe.execute()


def recorded_batches(connection: Redis, most: int = MAX_BATCHES) -> list[BatchRecord]:
    """Return at most `most` recorded batches, the latest first. Raises RedisError."""
    entries: Any = connection.zrevrange(API_BATCHES_KEY, 0, most - 1)
    records = []
    for entry in entries:
        record = _batch(stored.json_object(entry))
        if record is not None:
            records.append(record)
    return records


def batch_runs(connection: Redis, batches: Sequence[BatchRecord]) -> dict[str, RunSnapshot]:
    """Return the snapshots of batches' runs by run id, without runs that Redis has forgotten. Raises RedisError."""
    runs = [batch.run for batch in batches]
    snapshots = read_run_list(connection, runs)
    return {snapshot.run: snapshot for snapshot in snapshots}


def record_limited(connection: Redis, project: str, limit: str, now: float) -> None:
    """Record that a project's request was refused because of a limit. now: Unix seconds."""
    with connection.pipeline(transaction=False) as pipe:
        pipe.hset(API_LIMITED_KEY, f"{project} {limit}", str(int(now)))
        pipe.expire(API_LIMITED_KEY, RUN_TTL_S)
        pipe.execute()


def recorded_limits(connection: Redis) -> list[Limited]:
    """Return the limits that made the server refuse requests, with the latest refusal first. Raises RedisError."""
    fields: Any = connection.hgetall(API_LIMITED_KEY)
    limits = []
    for name, value in fields.items():
        project, _, limit = stored.text(name).partition(" ")
        last_at = stored.seconds(stored.text(value))
        if last_at is not None:
            limits.append(Limited(safe_name(project), safe_name(limit), last_at))
    limits.sort(key=lambda limited: limited.last_at, reverse=True)
    return limits[:MAX_LIMITED]


def _batch(fields: dict[str, Any]) -> BatchRecord | None:
    """Return the record that an entry's fields describe; None if a field is missing or wrong."""
    batch_id = fields.get("id")
    project = fields.get("project")
    run = fields.get("run")
    created_at = stored.count(fields.get("created_at"))
    expires_at = stored.count(fields.get("expires_at"))
    if not isinstance(batch_id, str) or not isinstance(project, str):
        return None
    if not isinstance(run, str) or not is_run_id(run):
        return None
    if created_at is None or expires_at is None:
        return None
    return BatchRecord(safe_name(batch_id), safe_name(project), run, created_at, expires_at)
