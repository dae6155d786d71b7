"""Reads the rows of the page of failed jobs, each of them once."""

import threading
from collections.abc import Sequence

from redis import Redis

from tokenmill.dashboard.failures.groups import Job
from tokenmill.dashboard.seen.jobs_seen import FailedJob, read_failed

#: The most rows that are remembered. The ones that were read first are forgotten first.
MAX_ROWS = 10_000


class FailedRows:
    """Failed jobs as a page shows them. Safe to call from many threads.

    A page asks for itself again every two seconds. A failed job does not change until it is tried again, and then it
    ends at another time. So a row is read again only if its job ended at another time. The time is unknown if RQ has
    failed a job whose worker was gone. The row of such a job is read each time.
    """

    def __init__(self, connection: Redis) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._rows: dict[tuple[float, Job], FailedJob] = {}

    def read(self, jobs: Sequence[tuple[float, Job]]) -> list[FailedJob]:
        """Return a row for each job, in the same order.

        jobs: each behind the time at which it ended, in Unix seconds. Raises RedisError.
        """
        with self._lock:
            unread = [entry for entry in jobs if entry not in self._rows]
            rows_read = read_failed(
                self._connection, [(job_id, queue) for _, (queue, job_id) in unread]
            )
            self._rows.update(zip(unread, rows_read, strict=True))
            rows = [self._rows[entry] for entry in jobs]
            self._forget_some(unread)
        return rows

    def _forget_some(self, just_read: Sequence[tuple[float, Job]]) -> None:
        """Forget the rows whose jobs' end is unknown or another than was said, and the oldest ones if they are many."""
        for entry in just_read:
            ended_at, _job = entry
            if self._rows[entry].ended_at != ended_at:
                del self._rows[entry]
        num_too_many = max(0, len(self._rows) - MAX_ROWS)
        for entry in list(self._rows)[:num_too_many]:
            del self._rows[entry]
