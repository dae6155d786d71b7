"""Reads the rows of the page of failed jobs, and remembers them."""

import threading
from collections.abc import Sequence

from redis import Redis

from tokenmill.dashboard.failures.groups import Job
from tokenmill.dashboard.seen.jobs_seen import FailedJob, read_failed

#: The most rows that are remembered. The rows that were read first are forgotten first.
MAX_ROWS = 10_000


class FailedRows:
    """The rows of the page of failed jobs. Safe to call from many threads.

    An open page updates itself every two seconds. A failed job changes only when it is tried again, and then it ends at
    another time. So a row is read again only if the end time of its job has changed. If a worker dies, RQ fails its job
    without an end time. The row of such a job is read each time.
    """

    def __init__(self, connection: Redis) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._rows: dict[tuple[float, Job], FailedJob] = {}

    def read(self, jobs: Sequence[tuple[float, Job]]) -> list[FailedJob]:
        """Return a row for each job, in the same order. Raises RedisError.

        jobs: (time, job), where the time is when the job ended, in Unix seconds.
        """
        with self._lock:
            unread = [timed_job for timed_job in jobs if timed_job not in self._rows]
            entries = [(job_id, queue) for _, (queue, job_id) in unread]
            new_rows = read_failed(self._connection, entries)
            self._rows.update(zip(unread, new_rows, strict=True))
            rows = [self._rows[timed_job] for timed_job in jobs]
            self._forget_some(unread)
        return rows

    def _forget_some(self, just_read: Sequence[tuple[float, Job]]) -> None:
        """Forget rows that may change. If too many rows are left, forget the oldest ones too.

        A row may change if the time at which its job ended is unknown, or is not the time that the caller knew.
        """
        for timed_job in just_read:
            ended_at, _job = timed_job
            if self._rows[timed_job].ended_at != ended_at:
                del self._rows[timed_job]
        num_too_many = max(0, len(self._rows) - MAX_ROWS)
        for timed_job in list(self._rows)[:num_too_many]:
            del self._rows[timed_job]
