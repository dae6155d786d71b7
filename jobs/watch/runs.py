"""The runs that Redis knows: a line for each, in a round trip for each that runs, and one in detail.

Counts of a list come from totals beside the parts, those of one run from its parts.
"""

from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from redis import Redis

from jobs.common import stored
from jobs.common.display import MAX_TEXT_CHARS, safe_name
from jobs.common.keys import RUNS_KEY
from jobs.errors import UnknownRun
from jobs.runs.redis_state.state import RunState, recorded_reasons
from jobs.runs.statistics.reasons import Reason
from jobs.runs.watching import snapshot as snapshots

#: The words of `RunSnapshot.state`.
STATES = ("planning", "not planned", "running", "ending", "finished", "failed", "cancelled", "stopped")

#: Runs that are listed, unless told otherwise.
MAX_RUNS = 200

#: Kinds of errors that are told of a run.
MAX_REASONS = 20


@dataclass(frozen=True)
class ShardSeen:
    """A shard of a run, and the worker that answers it, or did. rows: None where its part is not there yet.

    state: "done", "running", "failed", "queued", "gone" without a job in Redis, or "left" by a stopped run.
    """

    shard: int
    state: str
    rows: int | None = None
    rows_done: int = 0
    errors: int = 0
    tokens: int = 0
    seconds: float | None = None
    worker: str = ""


def list_runs(connection: Redis, limit: int = MAX_RUNS, states: Collection[str] = ()) -> list[snapshots.RunSnapshot]:
    """Return at most `limit` runs in these states, any for (), the last submitted first. Raises RedisError."""
    newest: Any = connection.zrevrange(RUNS_KEY, 0, limit - 1)
    found = []
    for look in snapshots.look_at(connection, list(map(stored.text, newest))):
        running, failed = look.started, look.failed
        progress = snapshots.read_progress(connection, list(running.values()))
        failed_jobs = tuple(failed[shard] for shard in sorted(failed.keys() - running.keys()))
        snapshot = snapshots.snapshot_of(look, progress, failed_jobs=failed_jobs)
        if snapshot.state == "running" and not running and snapshot.queued > look.queue_length:
            with suppress(UnknownRun):  # jobs of it are held by a worker, or gone
                snapshot = snapshots.read_snapshot(connection, look.run)
        found.append(snapshot)
    return [each for each in found if not states or each.state in states]


def run_reasons(connection: Redis, run: str) -> list[Reason]:
    """Return why rows of a run have an error, the commonest first, at most MAX_REASONS kinds, fit to be shown."""
    found = recorded_reasons(connection, run).commonest(MAX_REASONS)
    return [replace(each, text=safe_name(each.text, MAX_TEXT_CHARS)) for each in found]


def list_shards(connection: Redis, run: str, first: int = 0, count: int = 100) -> list[ShardSeen]:
    """Return shards of a planned run by number. Raises UnknownRun or RedisError."""
    look = snapshots.look_at_one(connection, run)
    is_cancelled = "cancelled" in look.facts and "finished" not in look.facts
    numbers = range(first, min(first + count, look.number("shards") or 0))
    parts = RunState(connection, run).parts_of(numbers)
    progress = snapshots.read_progress(connection, snapshots.shard_jobs(connection, run, numbers, look.facts))
    found = []
    for shard, each in zip(numbers, progress, strict=True):
        if (part := parts.get(shard)) is not None:
            counts = (part.rows, part.rows, part.errors, part.generated_tokens, part.seconds)
            found.append(ShardSeen(shard, "done", *counts, each.worker))
        elif shard in look.started:
            found.append(ShardSeen(shard, "running", None, each.rows, 0, each.tokens, None, each.worker))
        else:
            word = "failed" if shard in look.failed else "queued" if each.has_job else "gone"
            found.append(ShardSeen(shard, "left" if is_cancelled else word, worker=each.worker))
    return found
