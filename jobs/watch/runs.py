"""The runs that Redis knows: a line for each, in a round trip for each that runs, and one in detail.

Counts of a list come from totals beside the parts, those of one run from its parts.
"""

from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

from redis import Redis

from jobs.common import stored
from jobs.common.display import MAX_TEXT_CHARS, safe_name
from jobs.common.keys import RUNS_KEY, run_key
from jobs.common.rq_jobs import JobStatus, job_key, job_status
from jobs.errors import UnknownRun
from jobs.runs.plans.names import plan_job_id
from jobs.runs.redis_state.state import OF_SUBMISSION, OF_TIME, PLAN_ERROR, TOTALS, RunState, recorded_reasons
from jobs.runs.statistics.part_stats import COUNTED
from jobs.runs.statistics.reasons import Reason
from jobs.runs.watching import snapshot as snapshots

#: The words of `RunSnapshot.state`.
STATES = ("planning", "not planned", "running", "ending", "finished", "failed", "cancelled", "stopped")

MAX_RUNS = 200

MAX_REASONS = 20

#: Entries that are read of a queue's registry of running or failed jobs.
MAX_ENTRIES = 20_000

_FACTS = (
    *("output", "queue", "plan_job", "plan_model", "rows", "shards", "model", "model_text", "max_errors"),
    *("second_queue", "cancelled", "finished", "stopped", "submission", "cancelled_submission", PLAN_ERROR),
    *dict.fromkeys((*TOTALS, *OF_SUBMISSION, *OF_TIME)),
)


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
    read = _read_facts(connection, map(stored.text, newest))
    busy = {name for facts, *_ in read.values() if "finished" not in facts for name in snapshots.run_queues(facts)}
    workers = snapshots.living_workers(connection)
    queues = {
        name: snapshots.read_queue(connection, name, workers, MAX_ENTRIES if name in busy else 1)
        for name in {name for facts, *_ in read.values() for name in snapshots.run_queues(facts)}
    }
    found = []
    for run, (facts, done, status) in read.items():
        queue = reduce(snapshots.RunQueue.joined, (queues[name] for name in snapshots.run_queues(facts)))
        entries = ((), ()) if "finished" in facts else (queue.started, queue.failed)
        running, failed = (snapshots.shards_of(run, each) for each in entries)
        snapshot = snapshots.snapshot_of(
            run,
            facts,
            status,
            queue,
            {name: stored.count(facts.get(f"total_{name}")) or 0 for name in COUNTED},
            snapshots.read_progress(connection, list(running.values())),
            shards_done=done,
            failed_jobs=tuple(failed[shard] for shard in sorted(failed.keys() - running.keys())),
            plan_error=safe_name(facts[PLAN_ERROR], MAX_TEXT_CHARS) if PLAN_ERROR in facts else None,
        )
        if snapshot.state == "running" and not running and snapshot.queued > queue.length:
            with suppress(UnknownRun):  # jobs of it are held by a worker, or gone
                snapshot = snapshots.read_snapshot(connection, run)
        found.append(snapshot)
    return [each for each in found if not states or each.state in states]


def run_reasons(connection: Redis, run: str) -> list[Reason]:
    """Return why rows of a run have an error, the commonest first, at most MAX_REASONS kinds, fit to be shown."""
    found = recorded_reasons(connection, run).commonest(MAX_REASONS)
    return [replace(each, text=safe_name(each.text, MAX_TEXT_CHARS)) for each in found]


def list_shards(connection: Redis, run: str, first: int = 0, count: int = 100) -> list[ShardSeen]:
    state = RunState(connection, run)
    facts = state.facts()
    is_cancelled = "cancelled" in facts and "finished" not in facts
    numbers = range(first, min(first + count, stored.count(facts.get("shards")) or 0))
    parts = state.parts_of(numbers)
    queue = snapshots.read_queues(connection, facts, most=MAX_ENTRIES)
    started, failed = snapshots.shards_of(run, queue.started), snapshots.shards_of(run, queue.failed)
    progress = snapshots.read_progress(connection, snapshots.shard_jobs(connection, run, numbers, facts))
    found = []
    for shard, each in zip(numbers, progress, strict=True):
        if (part := parts.get(shard)) is not None:
            counts = (part.rows, part.rows, part.errors, part.generated_tokens, part.seconds)
            found.append(ShardSeen(shard, "done", *counts, each.worker))
        elif shard in started:
            found.append(ShardSeen(shard, "running", None, each.rows, 0, each.tokens, None, each.worker))
        else:
            word = "failed" if shard in failed else "queued" if each.has_job else "gone"
            found.append(ShardSeen(shard, "left" if is_cancelled else word, worker=each.worker))
    return found


def _read_facts(connection: Redis, runs: Iterable[str]) -> dict[str, tuple[dict[str, str], int, JobStatus | None]]:
    """Return facts, number of parts and planning's status of each run of which more is left than its id."""
    names = list(runs)
    with connection.pipeline(transaction=False) as pipe:
        for run in names:
            pipe.hmget(run_key(run), _FACTS)
            pipe.hlen(run_key(run, "parts"))
            pipe.hexists(run_key(run, "parts"), "total")
            pipe.hget(job_key(plan_job_id(run)), "status")
        replies = pipe.execute()
    found = {}
    for run, values, length, has_total, status in zip(names, *(replies[i::4] for i in range(4)), strict=True):
        told = zip(_FACTS, values, strict=True)
        facts = {name: stored.text(value) for name, value in told if value is not None}
        if facts.keys() >= {"output", "queue"}:
            found[run] = facts, length - has_total, job_status(status)
    return found
