"""Takes over the jobs of killed RQ workers, so that RQ's own workers and ours can share queues."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from redis import Redis
from rq.exceptions import AbandonedJobError
from rq.queue import Queue
from rq.serializers import JSONSerializer

from jobs.common.keys import prefixed
from jobs.common.rq_jobs import QueueKeys, executions_key
from worker.store.job_store import JobStore
from worker.store.records.claimed_job import ClaimedJob

_LOCK = prefixed("tokenmill:maintenance-stock:%s")

_MAX_JOBS = 1000
"""The most jobs that are checked in one period. Further jobs are checked in later periods."""

_STUCK_S = 60
"""Seconds after which a job in an intermediate queue counts as abandoned, as in RQ."""

_SEEN_TTL_S = 24 * 3600
"""Seconds for which Redis keeps the time when a job was first seen in an intermediate queue."""


class StockJobs:
    """Finds abandoned jobs as RQ's own cleanup does, and takes each over in one step.

    A started job has a time as its score in rq:wip, and is abandoned once this time has passed. Each heartbeat of the
    job's worker moves this time on. Without heartbeats, the time passes after about a minute.

    A job in an intermediate queue is abandoned if it stays there for a minute without an execution. RQ's cleanup lock
    on the queue is taken first, so that RQ's cleanup does not end the same job.
    """

    def __init__(
        self, client: Redis, store: JobStore, clock: Callable[[], float] = time.time
    ) -> None:
        self._client = client
        self._store = store
        self._clock = clock

    def take_over(
        self, queue_names: Sequence[str], period_s: float
    ) -> list[tuple[ClaimedJob, AbandonedJobError]]:
        """Take over abandoned jobs. At most one worker checks a queue in each period.

        Returns the jobs, which this worker holds now, and the error with which each of them fails.
        """
        adopted = []
        for name in queue_names:
            has_lock = self._client.set(_LOCK % name, 1, nx=True, px=int(period_s * 1000))
            if not has_lock:  # another worker has checked the queue in this period
                continue
            reasons = self._abandoned_started(name) | self._abandoned_intermediate(name)
            queue = Queue(name, connection=self._client, serializer=JSONSerializer)
            if reasons and queue.acquire_maintenance_lock():
                try:
                    adopted += self._store.adopt(name, reasons)
                finally:
                    queue.release_maintenance_lock()
        return [(claimed, AbandonedJobError(reason)) for claimed, reason in adopted]

    def _abandoned_started(self, queue: str) -> dict[tuple[str, str], str]:
        """Find the started jobs whose time in rq:wip has passed.

        Returns the reason why each job fails, by its job id and execution id.
        """
        members: Any = self._client.zrangebyscore(
            QueueKeys(queue).started, min=0, max=self._clock(), start=0, num=_MAX_JOBS
        )
        reasons = {}
        for member in members:
            job_id, _, execution_id = member.decode(errors="replace").rpartition(":")
            reasons[job_id, execution_id] = "the worker that ran it is gone"
        return reasons

    def _abandoned_intermediate(self, queue: str) -> dict[tuple[str, str], str]:
        """Find abandoned jobs in the intermediate queue. Such a job has no execution yet.

        Returns the reason why each job fails, by its job id and an empty execution id.
        """
        key = QueueKeys(queue).popped
        moment = self._clock()
        members: Any = self._client.lrange(key, 0, _MAX_JOBS - 1)
        job_ids = [member.decode(errors="replace") for member in members]
        with self._client.pipeline(transaction=False) as pipe:
            for job_id in job_ids:
                pipe.zcard(executions_key(job_id))
                # The queue does not say when a job came. So Redis keeps when a worker first saw the job there.
                pipe.set(f"{key}:first_seen:{job_id}", moment, nx=True, ex=_SEEN_TTL_S)
                pipe.get(f"{key}:first_seen:{job_id}")
            replies = iter(pipe.execute())  # read below in the order of the commands above

        reasons = {}
        for job_id in job_ids:
            num_executions = next(replies)
            next(replies)  # the reply to `set` is not needed
            first_seen_text = next(replies)
            age_s = moment - _seconds(first_seen_text, otherwise=moment)
            if not num_executions and age_s > _STUCK_S:
                reasons[job_id, ""] = "it was stuck in the intermediate queue: its worker is gone"
        return reasons


def _seconds(text: Any, otherwise: float) -> float:
    """Return the Unix seconds in a key's value; `otherwise` if the value is no number."""
    try:
        return float(text)
    except ValueError:
        return otherwise
