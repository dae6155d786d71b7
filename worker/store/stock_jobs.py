"""Jobs left behind by killed workers of RQ's own, so that both kinds can share queues."""

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
_MOST = 1000
"""Jobs looked at in each period: the rest has its turn in the next ones."""

_STUCK_S = 60
"""Once seen in an intermediate queue a job is left there this long, as RQ does."""

_SEEN_TTL_S = 24 * 3600


class StockJobs:
    """Finds and takes over jobs by RQ's own signs, one by one, each in one step.

    A started job is left behind if its score in rq:wip has passed: no heartbeat for a minute. One in an intermediate
    queue is if it stays there for a minute without an execution. RQ's cleanup lock on the queue is taken first: no
    job ends twice.
    """

    def __init__(self, client: Redis, store: JobStore, clock: Callable[[], float] = time.time) -> None:
        self._client, self._store, self._clock = client, store, clock

    def take_over(self, queue_names: Sequence[str], period_s: float) -> list[tuple[ClaimedJob, AbandonedJobError]]:
        """Take over jobs left behind; at most one worker looks at a queue in each period.

        Returns the jobs, which this worker holds then, and why each fails.
        """
        taken = []
        for name in queue_names:
            if not self._client.set(_LOCK % name, 1, nx=True, px=int(period_s * 1000)):
                continue
            left = self._started(name) | self._intermediate(name)
            queue = Queue(name, connection=self._client, serializer=JSONSerializer)
            if left and queue.acquire_maintenance_lock():
                try:
                    taken += self._store.adopt(name, left)
                finally:
                    queue.release_maintenance_lock()
        return [(claimed, AbandonedJobError(why)) for claimed, why in taken]

    def _started(self, queue: str) -> dict[tuple[str, str], str]:
        members: Any = self._client.zrangebyscore(QueueKeys(queue).started, 0, self._clock(), 0, _MOST)
        ids = [member.decode(errors="replace").rpartition(":") for member in members]
        return {(job_id, execution_id): "the worker that ran it is gone" for job_id, _, execution_id in ids}

    def _intermediate(self, queue: str) -> dict[tuple[str, str], str]:
        key, moment = QueueKeys(queue).popped, self._clock()
        found: Any = self._client.lrange(key, 0, _MOST - 1)
        ids = [job_id.decode(errors="replace") for job_id in found]
        with self._client.pipeline(transaction=False) as pipe:
            for job_id in ids:
                pipe.zcard(executions_key(job_id))
                pipe.set(f"{key}:first_seen:{job_id}", moment, nx=True, ex=_SEEN_TTL_S)
                pipe.get(f"{key}:first_seen:{job_id}")
            seen = pipe.execute()
        return {
            (job_id, ""): "it was stuck in the intermediate queue: its worker is gone"
            for job_id, executions, first in zip(ids, seen[::3], seen[2::3], strict=True)
            if not executions and moment - _seconds(first, moment) > _STUCK_S
        }


def _seconds(text: Any, otherwise: float) -> float:
    """Return the moment in a key; `otherwise` if a producer has written no number."""
    try:
        return float(text)
    except ValueError:
        return otherwise
