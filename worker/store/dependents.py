"""The jobs that wait for one that has ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from redis import Redis
from redis.exceptions import RedisError
from rq.job import Job, JobStatus
from rq.serializers import JSONSerializer
from rq.utils import now, utcformat

from jobs.common.rq_jobs import job_key
from worker.store.records.claimed_job import ClaimedJob, is_text
from worker.store.scripts import Scripts, is_wrong_type

PAGE = 200
"""Dependents that are looked at in one turn, about: anybody may name a million jobs that never were."""


class Dependents:
    """Queues them. Not thread-safe, and raises as `JobStore` does, whose part it is."""

    def __init__(self, client: Redis, scripts: Scripts, clock: Callable[[], float]) -> None:
        self._client, self._call_many, self._clock = client, scripts.call_many, clock

    def queue(self, claimed: ClaimedJob, cursor: int = 0) -> int:
        """Queue a page of the jobs that wait for an ended one and for nothing else; return where the next is.

        cursor: where this one begins. Returns 0 after the last page.
        Each is queued once: also when this is called again, and when two jobs that it waited for end at the
        same time, where RQ's own way queues it twice.
        """
        ended_as: Any = self._client.hget(job_key(claimed.job_id), "ended_as")
        if ended_as is None:  # closed already, by whoever took it over
            return 0
        ended = Job(connection=self._client)
        ended._id, ended._status = claimed.job_id, JobStatus(ended_as.decode())
        following, members = self._page(ended, cursor)
        calls = []
        for dependent in self._fetch([member.decode() for member in members if is_text(member)]):
            if self._may_run(dependent, ended):
                front = int(bool(dependent.enqueue_at_front))
                ids = (dependent.origin, dependent.id, claimed.job_id)
                now_iso, now_ts = utcformat(now()), repr(self._clock())
                calls.append(("queue_dependent", (*ids, now_iso, front, now_ts)))
        if calls:
            self._call_many(calls, keep_refusals=True)
        return following

    def _page(self, job: Job, cursor: int) -> tuple[int, list[bytes]]:
        """Ids of jobs that wait for this one; none where another type of key stands in their place."""
        try:
            found: Any = self._client.sscan(job.dependents_key, cursor, count=PAGE)
        except RedisError as error:
            if not is_wrong_type(error):
                raise
            return 0, []
        return int(found[0]), found[1]

    def _may_run(self, dependent: Job, ended: Job) -> bool:
        """Whether a job waits for nothing but the one that has ended."""
        try:
            # What it has ended as is known here: its status may be that of a copy that was saved since.
            return bool(dependent.dependencies_are_met(parent_job=ended, refresh_job_status=False))
        except RedisError as error:
            if not is_wrong_type(error):
                raise
            return False
        except ValueError:  # a status that is no text: nobody can say whether that job has ended well
            return False

    def _fetch(self, job_ids: Sequence[str]) -> Iterator[Job]:
        """What decides when and where each is queued, but for those that are gone or damaged in that."""
        calls = [("dependent", [job_id]) for job_id in job_ids]
        found = self._call_many(calls, keep_refusals=True) if calls else []
        for job_id, fields in zip(job_ids, found, strict=True):
            if isinstance(fields, RedisError) or not fields:
                continue
            try:
                job = Job(job_id, self._client, JSONSerializer)
                job.origin, front, allows_failures = (field.decode() for field in fields)
                job.enqueue_at_front = bool(int(front or 0))
                job.allow_dependency_failures = bool(int(allows_failures or 0))
            except ValueError:  # an id that RQ would refuse, or no text, or no number
                continue
            yield job
