"""Lists the shards of a run for its page."""

from dataclasses import dataclass

from redis import Redis

from jobs.errors import UnknownRun
from jobs.runs.plans.names import shard_job_id
from jobs.runs.redis_state.state import RunState
from jobs.runs.watching.reading import MAX_ENTRIES, read_progress, read_queue, run_readers
from jobs.runs.watching.run_reader import RunReader


@dataclass(frozen=True)
class ShardSeen:
    """A shard of a run.

    state: "done", "running", "failed", "queued", "gone" (it has no job in Redis) or "left" (the run was cancelled).
    seconds: how long the shard took; None until it is done. worker: the worker that holds or held the shard; "" if it
    is not known. job_id: "" if Redis has no job of the shard.
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
    """Return at most `count` of a run's shards, from shard `first` on. Raises UnknownRun and RedisError."""
    readers = run_readers(connection, [run])
    if not readers:
        raise UnknownRun(run)
    [reader] = readers
    shard_numbers = range(first, min(first + count, reader.shards or 0))
    parts = RunState(connection, run).parts_of(shard_numbers)
    reader.add_queues({name: read_queue(connection, name, MAX_ENTRIES) for name in reader.queues})
    first_jobs = read_progress(connection, [shard_job_id(run, shard) for shard in shard_numbers])
    second_jobs = read_progress(
        connection, [shard_job_id(run, shard, is_second=True) for shard in shard_numbers]
    )

    shards = []
    for shard, first_job, second_job in zip(shard_numbers, first_jobs, second_jobs, strict=True):
        # In a cascade, the job for the second model comes after the job for the first one.
        is_second = second_job.has_job
        progress = second_job if is_second else first_job
        job_id = shard_job_id(run, shard, is_second) if progress.has_job else ""
        part = parts.get(shard)
        if part is not None:
            listed = ShardSeen(
                shard,
                "done",
                rows_done=part.rows,
                errors=part.errors,
                tokens=part.generated_tokens,
                seconds=part.seconds,
                worker=part.worker or progress.worker,
                job_id=job_id,
            )
        elif shard in reader.started:
            listed = ShardSeen(
                shard,
                "running",
                rows_done=progress.rows,
                tokens=progress.tokens,
                worker=progress.worker,
                job_id=job_id,
            )
        else:
            state = _idle_state(reader, shard, has_job=progress.has_job)
            listed = ShardSeen(shard, state, worker=progress.worker, job_id=job_id)
        shards.append(listed)
    return shards


def _idle_state(reader: RunReader, shard: int, *, has_job: bool) -> str:
    """Return the state of a shard that has no output yet and does not run. has_job: whether Redis has a job of it."""
    is_cancelled = "cancelled" in reader.facts and not reader.is_finished
    if is_cancelled:
        return "left"
    if shard in reader.failed:
        return "failed"
    return "queued" if has_job else "gone"
