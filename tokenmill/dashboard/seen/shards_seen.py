"""A run's shards, as its page lists them: those with a part, and those whose jobs run, wait, or have failed."""

from dataclasses import dataclass

from redis import Redis

from jobs.errors import UnknownRun
from jobs.runs.plans.names import shard_job_id
from jobs.runs.redis_state.state import RunState
from jobs.runs.watching.reading import MAX_ENTRIES, read_progress, read_queue, run_readers


@dataclass(frozen=True)
class ShardSeen:
    """A shard of a run, and the worker that answers it, or did.

    state: "done", "running", "failed", "queued", "gone" without a job in Redis, or "left" by a stopped run. job_id: of
    its job; "" if Redis has none.
    """

    shard: int
    state: str
    rows_done: int = 0
    errors: int = 0
    tokens: int = 0
    seconds: float | None = None
    worker: str = ""
    job_id: str = ""


def list_shards(connection: Redis, run: str, first: int = 0, count: int = 100) -> list[ShardSeen]:
    """Return at most `count` of a run's shards. Raises UnknownRun."""
    readers = run_readers(connection, [run])
    if not readers:
        raise UnknownRun(run)
    [reader] = readers
    numbers = range(first, min(first + count, reader.shards or 0))
    parts = RunState(connection, run).parts_of(numbers)
    reader.add_queues({name: read_queue(connection, name, MAX_ENTRIES) for name in reader.queues})
    told = read_progress(connection, [shard_job_id(run, shard) for shard in numbers])
    again = read_progress(
        connection, [shard_job_id(run, shard, is_second=True) for shard in numbers]
    )
    found = []
    for shard, one, two in zip(numbers, told, again, strict=True):
        each = two if two.has_job else one
        job_id = shard_job_id(run, shard, is_second=two.has_job) if each.has_job else ""
        if (part := parts.get(shard)) is not None:
            counts = (part.rows, part.errors, part.generated_tokens, part.seconds)
            found.append(ShardSeen(shard, "done", *counts, part.worker or each.worker, job_id))
        elif shard in reader.started:
            found.append(
                ShardSeen(
                    shard,
                    "running",
                    each.rows,
                    tokens=each.tokens,
                    worker=each.worker,
                    job_id=job_id,
                )
            )
        else:
            word = "failed" if shard in reader.failed else "queued" if each.has_job else "gone"
            is_left = "cancelled" in reader.facts and not reader.is_finished
            state = "left" if is_left else word
            found.append(ShardSeen(shard, state, worker=each.worker, job_id=job_id))
    return found
