"""Lists runs for the pages. All open pages share one list, which is read again only when it is too old."""

import threading
import time
from collections.abc import Callable

from redis import Redis

from jobs.runs.watching.reading import list_runs
from jobs.runs.watching.snapshot import RunSnapshot
from tokenmill.dashboard.seen.watcher import LOOK_S, LOOK_SHARE

#: The most runs that are listed.
MAX_RUNS = 200


class RunsSeen:
    """The runs that were submitted last. Safe to call from many threads. clock: monotonic seconds."""

    def __init__(self, connection: Redis, clock: Callable[[], float] = time.monotonic) -> None:
        self._connection = connection
        self._clock = clock
        self._lock = threading.Lock()
        self._runs: list[RunSnapshot] = []
        self._expires_at = float("-inf")

    def newest(self) -> list[RunSnapshot]:
        """Return at most MAX_RUNS runs, the last submitted first. Raises RedisError.

        They are read again once they are LOOK_S old, or later if the last reading was slow (see LOOK_SHARE).
        """
        with self._lock:
            began_at = self._clock()
            if began_at >= self._expires_at:
                self._runs = list_runs(self._connection, MAX_RUNS)
                now = self._clock()
                read_s = now - began_at
                self._expires_at = now + max(LOOK_S, read_s / LOOK_SHARE)
            return self._runs
