"""Lists jobs of a queue: those that wait, run, are scheduled or deferred, have finished or failed."""

from dataclasses import dataclass
from typing import Any

from redis import Redis

from jobs.common import rq_jobs, stored
from jobs.common.display import safe_name
from tokenmill.dashboard.seen.jobs_seen import MAX_PAYLOAD_BYTES, called

#: For each place of `jobs.queues.PLACES`, the time that a list shows: a field of the job, or "" for its score.
_TIMES = {
    "waiting": "enqueued_at",
    "executing": "started_at",
    "scheduled": "",
    "deferred": "created_at",
    "finished": "ended_at",
    "failed": "ended_at",
}


@dataclass(frozen=True)
class ListedJob:
    """A job of a list. function: None where its name cannot be read. at: see _TIMES; Unix seconds."""

    job_id: str
    function: str | None
    at: float | None
    worker: str


def list_jobs(connection: Redis, queue: str, place: str, first: int, most: int) -> list[ListedJob]:
    """Return up to `most` jobs of a queue without the first ones.

    They come as workers take them; finished and failed ones come with the newest first. place: one of PLACES. Raises
    RedisError.
    """
    keys = rq_jobs.QueueKeys(queue)
    last = first + most - 1
    scores: dict[str, float] = {}
    entries: Any
    if place == "waiting":
        entries = connection.lrange(keys.waiting, first, last)
    elif place in ("finished", "failed"):
        entries = connection.zrevrange(getattr(keys, place), first, last)
    elif place == "scheduled":
        with_scores: Any = connection.zrange(keys.scheduled, first, last, withscores=True)
        entries = [entry for entry, _ in with_scores]
        scores = {stored.text(entry): score for entry, score in with_scores}
    else:
        entries = connection.zrange(
            keys.started if place == "executing" else keys.deferred, first, last
        )
    job_ids = [stored.text(entry) for entry in entries]
    if place == "executing":
        job_ids = [job_id.partition(":")[0] for job_id in job_ids]
    return _read(connection, job_ids, _TIMES[place], scores)


def _read(
    connection: Redis, job_ids: list[str], time_field: str, scores: dict[str, float]
) -> list[ListedJob]:
    hashes = [rq_jobs.job_key(job_id) for job_id in job_ids]
    with connection.pipeline(transaction=False) as pipe:
        for key in hashes:
            pipe.hmget(key, time_field or "created_at", "worker_name")
            pipe.hstrlen(key, "data")
        # Anybody may have put another kind of value there.
        replies = pipe.execute(raise_on_error=False)
        for key, num_bytes in zip(hashes, replies[1::2], strict=True):
            is_short = isinstance(num_bytes, int) and num_bytes <= MAX_PAYLOAD_BYTES
            pipe.hget(key, "data" if is_short else "")
        payloads = pipe.execute(raise_on_error=False)

    jobs = []
    for job_id, fields, data in zip(job_ids, replies[::2], payloads, strict=True):
        at, worker = fields if isinstance(fields, list) else (None, None)
        function = called(data)[0] if isinstance(data, bytes) else None
        moment = stored.moment(at) if time_field else scores.get(job_id)
        jobs.append(ListedJob(job_id, function, moment, safe_name(worker or b"")))
    return jobs
