"""A run's jobs: what their hashes tell, read field by field, which stand on a queue, and which workers hold.

RQ's executions tell who holds a job: one that waits inside a worker still says "queued".
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import cast

from redis import Redis
from redis.client import Pipeline

from jobs.common import rq_jobs, stored
from jobs.common.keys import SUBMISSION_FIELD
from jobs.common.rq_jobs import JobStatus
from jobs.runs.plans.names import job_shard


@dataclass(frozen=True)
class EarlierJob:
    """A job as its hash tells of it. status: None for an unknown one. submission: of its run, that has enqueued it."""

    id: str
    status: JobStatus | None
    origin: str
    executions: tuple[str, ...]
    submission: int = 0
    in_queue: bool = False

    @property
    def waits(self) -> bool:
        return self.status == JobStatus.QUEUED and self.in_queue and not self.executions

    def delete(self, pipe: Pipeline, from_queue: bool = True) -> None:
        """Delete it as RQ's `Job.delete` does. from_queue: also take it off its queue."""
        keys = rq_jobs.QueueKeys(self.origin)
        if from_queue:
            pipe.lrem(keys.waiting, 1, self.id)
        for key in (keys.finished, keys.failed, keys.deferred, keys.ready, keys.scheduled, keys.cancelled):
            pipe.zrem(key, self.id)
        for execution in self.executions:
            pipe.zrem(keys.started, f"{self.id}:{execution}")
            pipe.delete(rq_jobs.execution_key(self.id, execution))
        pipe.delete(rq_jobs.executions_key(self.id), rq_jobs.job_key(self.id), *rq_jobs.relatives_keys(self.id))


def read_earlier(connection: Redis, job_ids: Sequence[str], queue: rq_jobs.QueueKeys | None = None) -> list[EarlierJob]:
    """Return those of the jobs that Redis has, all of one moment. queue: where they are looked for as well."""
    keys = () if queue is None else (queue.waiting, queue.popped)
    with connection.pipeline() as pipe:
        for key in keys:
            pipe.lrange(key, 0, -1)
        for job_id in job_ids:
            pipe.exists(rq_jobs.job_key(job_id))
            pipe.hmget(rq_jobs.job_key(job_id), "status", "origin", SUBMISSION_FIELD)
            pipe.zrange(rq_jobs.executions_key(job_id), 0, -1)
        replies = pipe.execute()
    in_queue = {stored.text(job_id) for ids in replies[: len(keys)] for job_id in ids}
    del replies[: len(keys)]
    return [
        EarlierJob(
            job_id,
            rq_jobs.job_status(status),
            stored.text(origin or b""),
            tuple(map(stored.text, executions)),
            stored.count(stored.text(submission or b"")) or 0,
            job_id in in_queue,
        )
        for job_id, is_there, (status, origin, submission), executions in zip(
            job_ids, replies[::3], replies[1::3], replies[2::3], strict=True
        )
        if is_there
    ]


#: Entries that are read at once: Redis is busy with them for about a millisecond.
PAGE = 5000


class WaitingJobs:
    """Jobs of one run that were on the queue when first asked for; of one that is not among them, look again."""

    def __init__(self, queue: rq_jobs.JobQueue, run: str) -> None:
        self.queue, self._run = queue, run

    def among(self, job_ids: Collection[str]) -> set[str]:
        """Return those of these jobs that were on the queue, or taken from it by a worker of RQ's own."""
        return self._found & set(job_ids)

    @cached_property
    def _found(self) -> set[str]:
        found: set[str] = set()
        for key in (self.queue.keys.waiting, self.queue.keys.popped):
            start = 0
            while page := cast("list[bytes]", self.queue.connection.lrange(key, start, start + PAGE - 1)):
                start += PAGE
                found.update(each for each in map(stored.text, page) if job_shard(self._run, each) is not None)
        return found


_CHUNK = 1000


def read_holders(connection: Redis, job_ids: Sequence[str]) -> list[tuple[str, str, str]]:
    """Return the executions that hold some of the jobs: job, execution and the worker's name."""
    with connection.pipeline(transaction=False) as pipe:
        for job_id in job_ids:
            pipe.zrange(rq_jobs.executions_key(job_id), 0, -1)
        held = [
            (job_id, stored.text(execution))
            for job_id, executions in zip(job_ids, pipe.execute(), strict=True)
            for execution in executions
        ]
        for job_id, execution in held:
            pipe.hget(rq_jobs.execution_key(job_id, execution), "worker_name")
        return [(*each, stored.text(name)) for each, name in zip(held, pipe.execute(), strict=True) if name]


def num_held(connection: Redis, job_ids: Iterable[str]) -> int:
    left, found = iter(job_ids), 0
    while chunk := [rq_jobs.executions_key(job_id) for job_id in islice(left, _CHUNK)]:
        found += int(connection.exists(*chunk))
    return found
