"""Counts and cleans what all workers share: queues, registries and rate limits."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from redis import Redis
from redis.exceptions import ResponseError
from rq.group import Group
from rq.job import Job
from rq.utils import now, utcformat
from rq.worker_registration import REDIS_WORKER_KEYS, WORKERS_BY_QUEUE_KEY

from jobs.common.keys import JOURNALS_KEY, RQ, journal_key
from jobs.common.rq_jobs import RATE_LIMITS_KEY
from worker.store.client import is_server_fault
from worker.store.scripts import Call, Scripts

_BATCH = 200
"""Members of a set, or rate limits, that are read in one round trip."""


class Registries:
    """Counts queued jobs, and drops what is stale in Redis. Not thread-safe; raises redis.exceptions.RedisError."""

    def __init__(self, client: Redis, clock: Callable[[], float] = time.time) -> None:
        self._client = client
        self._clock = clock
        self._call_many = Scripts(client).call_many

    def clean(self, queue_names: Sequence[str]) -> None:
        """Drop expired entries of finished and failed jobs, and stale workers, group members and journals.

        RQ's own cleanup of started jobs is not used. It goes by a job's score in the registry, not by the job's lease,
        and it runs callbacks.
        """
        groups: Any = self._client.smembers(Group.REDIS_GROUP_KEY)
        for group in groups:
            key = Group.REDIS_GROUP_NAME_PREFIX.encode() + group
            self._drop_gone(key, Job.redis_job_namespace_prefix)
        self._drop_gone(Group.REDIS_GROUP_KEY, Group.REDIS_GROUP_NAME_PREFIX)
        for name in queue_names:
            for registry in ("finished", "failed"):
                self._client.zremrangebyscore(f"{RQ}:{registry}:{name}", 0, self._clock())
            self._drop_gone(WORKERS_BY_QUEUE_KEY % name)
        self._drop_gone(REDIS_WORKER_KEYS)
        self._drop_journals()

    def _drop_gone(self, key: str | bytes, prefix: str = "") -> None:
        """Drop each member of a set if the member's own key is gone. This key is `prefix`, followed by the member.

        If `key` holds something other than a set, nothing is changed.
        """
        try:
            members: Any = list(self._client.smembers(key))
        except ResponseError as error:
            if is_server_fault(error):
                raise
            return
        for start in range(0, len(members), _BATCH):
            batch = members[start : start + _BATCH]
            with self._client.pipeline(transaction=False) as pipe:
                for member in batch:
                    pipe.exists(prefix.encode() + member)
                replies = pipe.execute()
            gone = []
            for member, exists in zip(batch, replies, strict=True):
                if not exists:
                    gone.append(member)
            if gone:
                self._client.srem(key, *gone)

    def _drop_journals(self) -> None:
        """Drop the journals (see JOURNALS_KEY) of jobs that were deleted or cancelled while no worker held them."""
        job_ids: Any = self._client.smembers(JOURNALS_KEY)
        for job_id in job_ids:
            journal = journal_key(job_id.decode())
            with self._client.pipeline(transaction=False) as pipe:
                pipe.exists(journal)
                pipe.hget(Job.redis_job_namespace_prefix.encode() + job_id, "status")
                has_journal, status = pipe.execute(raise_on_error=False)
            # If the job's key holds something other than a hash, the reply is an error, and there is no such job.
            has_no_hash = isinstance(status, ResponseError) and not is_server_fault(status)
            is_gone = has_no_hash or status in (None, b"canceled")
            if is_gone or not has_journal:
                self._client.delete(journal)
                self._client.srem(JOURNALS_KEY, job_id)

    def queue_left_behind(self, queue_names: Sequence[str]) -> None:
        """Queue jobs that wait for a cancelled job or for a killed RQ worker. Nobody else would queue them."""
        time_arguments = {"now_iso": utcformat(now()), "now_ts": repr(self._clock())}
        # The registry "ready" has the jobs that a killed RQ worker should have queued.
        ready_arguments = {**time_arguments, "registry": "ready", "most": _BATCH}
        calls = [Call("enqueue_due", {"queue": name, **ready_arguments}) for name in queue_names]
        # Cancelled jobs may still hold slots of rate limits. The script frees these slots for the jobs that wait. Each
        # call of this method looks at some limits, chosen at random.
        keys: Any = self._client.srandmember(RATE_LIMITS_KEY, _BATCH)
        calls += [Call("rate_limits", {"key": key.decode(), **time_arguments}) for key in keys]
        self._call_many(calls)

    def count_queued(self, queue_names: Sequence[str]) -> int:
        """Count the jobs that wait in these queues."""
        with self._client.pipeline(transaction=False) as pipe:
            for name in queue_names:
                pipe.llen(f"{RQ}:queue:{name}")
            return sum(pipe.execute())
