"""The jobs that wait for one that has ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from redis import Redis
from rq.job import Job, JobStatus
from rq.serializers import JSONSerializer
from rq.utils import now, utcformat

from jobs.common.rq_jobs import job_key
from worker.store.records.claimed_job import ClaimedJob
from worker.store.scripts import Scripts

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
        found: Any = self._client.sscan(ended.dependents_key, cursor, count=PAGE)
        following, members = int(found[0]), found[1]
        calls = []
        for dependent in self._fetch([member.decode() for member in members]):
            if self._may_run(dependent, ended):
                front = int(bool(dependent.enqueue_at_front))
                ids = (dependent.origin, dependent.id, claimed.job_id)
                now_iso, now_ts = utcformat(now()), repr(self._clock())
                calls.append(("queue_dependent", (*ids, now_iso, front, now_ts)))
        if calls:
            self._call_many(calls)
        return following

    def _may_run(self, dependent: Job, ended: Job) -> bool:
        """Whether a job waits for nothing but the one that has ended."""
        try:
            # What it has ended as is known here: its status may be that of a copy that was saved since.
            return bool(dependent.dependencies_are_met(parent_job=ended, refresh_job_status=False))
        except ValueError:  # a status that is no text: nobody can say whether that job has ended well
            return False

    def _fetch(self, job_ids: Sequence[str]) -> Iterator[Job]:
        """What decides when and where each is queued, but for those that are gone or damaged in that."""
        calls = [("dependent", [job_id]) for job_id in job_ids]
        found = self._call_many(calls) if calls else []
        for job_id, fields in zip(job_ids, found, strict=True):
            if not fields:
                continue
            try:
                job = Job(job_id, self._client, JSONSerializer)
                job.origin, front, allows_failures = (field.decode() for field in fields)
                job.enqueue_at_front = bool(int(front or 0))
                job.allow_dependency_failures = bool(int(allows_failures or 0))
            except ValueError:  # an id that RQ would refuse, or no text, or no number
                continue
            yield job
