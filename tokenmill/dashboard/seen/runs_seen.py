"""Lists runs for all open pages together, as seldom as possible."""

import threading
import time
from collections.abc import Callable

from redis import Redis

from jobs.runs.watching.reading import list_runs
from jobs.runs.watching.snapshot import RunSnapshot
from tokenmill.dashboard.seen.watcher import LOOK_S, LOOK_SHARE

#: The most runs that are listed, the last submitted ones.
MAX_RUNS = 200


class RunsSeen:
    """The runs that were submitted last. Safe to call from many threads. clock: seconds that never go back."""

    def __init__(self, connection: Redis, clock: Callable[[], float] = time.monotonic) -> None:
        self._connection = connection
        self._clock = clock
        self._lock = threading.Lock()
        self._runs: list[RunSnapshot] = []
        self._serves_until = float("-inf")

    def newest(self) -> list[RunSnapshot]:
        """Return the runs, the last submitted first, as they were LOOK_S ago at most. Raises RedisError."""
        with self._lock:
            began = self._clock()
            if began >= self._serves_until:
                self._runs = list_runs(self._connection, MAX_RUNS)
                now = self._clock()
                self._serves_until = now + max(LOOK_S, (now - began) / LOOK_SHARE)
            return self._runs
