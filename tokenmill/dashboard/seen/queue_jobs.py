"""Lists the jobs of a queue that are in one state, such as waiting or failed."""

from dataclasses import dataclass
from typing import Any

from redis import Redis

from jobs.common import rq_jobs, stored
from jobs.common.display import safe_name
from tokenmill.dashboard.seen.jobs_seen import MAX_PAYLOAD_BYTES, called

#: By place (`jobs.queues.PLACES`): the job's field with the time that a list shows. A scheduled job has no such field:
#: its time is its score in the sorted set.
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
    """A job of a list. function: None if the payload cannot be read.

    at: the time that the list shows (see _TIMES), in Unix seconds.
    """

    job_id: str
    function: str | None
    at: float | None
    worker: str


def list_jobs(connection: Redis, queue: str, place: str, first: int, most: int) -> list[ListedJob]:
    """Return at most `most` jobs of a queue, from number `first` on. Raises RedisError.

    Finished and failed jobs come with the newest first. All others come in the order in which workers take them.
    place: one of PLACES.
    """
    keys = rq_jobs.QueueKeys(queue)
    last = first + most - 1
    scores: dict[str, float] = {}
    entries: Any
    if place == "waiting":
        entries = connection.lrange(keys.waiting, first, last)
    elif place == "executing":
        # An entry is a job's id, a colon and the id of the execution.
        executions: Any = connection.zrange(keys.started, first, last)
        entries = [entry.partition(b":")[0] for entry in executions]
    elif place == "scheduled":
        scored: Any = connection.zrange(keys.scheduled, first, last, withscores=True)
        entries = [entry for entry, _ in scored]
        scores = {stored.text(entry): score for entry, score in scored}
    elif place == "deferred":
        entries = connection.zrange(keys.deferred, first, last)
    elif place == "finished":
        entries = connection.zrevrange(keys.finished, first, last)
    else:
        entries = connection.zrevrange(keys.failed, first, last)
    job_ids = [stored.text(entry) for entry in entries]
    return _read(connection, job_ids, _TIMES[place], scores)


def _read(
    connection: Redis, job_ids: list[str], time_field: str, scores: dict[str, float]
) -> list[ListedJob]:
    """Return these jobs. time_field: see _TIMES; if it is "", a job's time is its score.

    scores: the times of scheduled jobs by id.
    """
    keys = [rq_jobs.job_key(job_id) for job_id in job_ids]
    with connection.pipeline(transaction=False) as pipe:
        for key in keys:
            # The time of a scheduled job is its score. Its created_at is read too, so that all replies have one form.
            pipe.hmget(key, time_field or "created_at", "worker_name")
            pipe.hstrlen(key, "data")
        # A key may hold a value of another type, which a producer has written.
        replies = pipe.execute(raise_on_error=False)
        fields_of_jobs = replies[0::2]
        sizes = replies[1::2]
        for key, num_bytes in zip(keys, sizes, strict=True):
            is_short = isinstance(num_bytes, int) and num_bytes <= MAX_PAYLOAD_BYTES
            # No job has the field "". Reading it keeps the payloads aligned with the jobs.
            pipe.hget(key, "data" if is_short else "")
        payloads = pipe.execute(raise_on_error=False)

    jobs = []
    for job_id, fields, data in zip(job_ids, fields_of_jobs, payloads, strict=True):
        raw_time, worker = fields if isinstance(fields, list) else (None, None)
        function = None
        if isinstance(data, bytes):
            function, _ = called(data)
        at = stored.moment(raw_time) if time_field else scores.get(job_id)
        jobs.append(ListedJob(job_id, function, at, safe_name(worker or b"")))
    return jobs
