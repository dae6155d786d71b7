"""Which jobs of a run stand on a queue that may hold a million others: read once, a page at a time."""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property
from typing import Any

from jobs.common import stored
from jobs.common.rq_jobs import JobQueue
from jobs.runs.plans.names import job_shard

#: Entries that are read at once: Redis is busy with them for about a millisecond.
PAGE = 5000


class WaitingJobs:
    """Those of one run, as they stood when they were first asked for.

    What moves meanwhile may be missed: of a job that is not among them, look again.
    """

    def __init__(self, queue: JobQueue, run: str) -> None:
        self.queue, self._run = queue, run

    def among(self, job_ids: Collection[str]) -> set[str]:
        """Return those of these jobs that were on the queue, or taken from it by a worker of RQ's own."""
        return self._found & set(job_ids)

    @cached_property
    def _found(self) -> set[str]:
        found: set[str] = set()
        for key in (self.queue.keys.waiting, self.queue.keys.popped):
            start = 0
            while page := self._page(key, start):
                start += PAGE
                found.update(job_id for job_id in page if job_shard(self._run, job_id) is not None)
        return found

    def _page(self, key: str, start: int) -> list[str]:
        entries: Any = self.queue.connection.lrange(key, start, start + PAGE - 1)
        return [stored.text(entry) for entry in entries]
