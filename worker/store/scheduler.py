"""Scheduler: RQ's scheduler. A worker runs a round of the scheduler each second, in a thread."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from redis import Redis
from redis.exceptions import RedisError
from rq import Queue
from rq.scheduler import RQScheduler
from rq.serializers import JSONSerializer
from rq.utils import now, utcformat

from jobs.common.display import shown_error
from worker.logs import LastingTrouble
from worker.store.client import new_client
from worker.store.redis_clock import RedisClock
from worker.store.scripts import Call, Scripts
from worker.threads.functions import FunctionPool

_REDIS_TIMEOUT_S = 10.0

_REACQUIRE_S = 10.0
"""Seconds between two attempts to get the locks that this scheduler lacks."""

_BATCH = 1000
"""The most scheduled jobs that are enqueued in each round. RQ's own limit is the same."""


class Scheduler(RQScheduler):
    """RQ's scheduler in a thread.

    It keeps trying to get the locks that another scheduler has. So it takes over from a dead scheduler.
    """

    def __init__(
        self, queues: Sequence[Queue], connection: Redis, level: int | str, formats: tuple[str, str]
    ) -> None:
        """Make a scheduler for some queues.

        level: the level of the log. formats: its formats for dates and for lines. `rq worker` has an option for each.
        """
        interval_s = 1  # between two rounds
        super().__init__(queues, connection, interval_s, level, *formats, serializer=JSONSerializer)
        client: Any = new_client(connection, _REDIS_TIMEOUT_S)
        self._connection = client
        self._scripts = Scripts(client)
        self._clock = RedisClock()
        self._pool = FunctionPool(1, "tokenmill-scheduler")
        self._trouble = LastingTrouble(self.log, "the scheduler works again")
        self._is_running = False

    @property
    def should_reacquire_locks(self) -> bool:
        """Whether to try now to get the locks that this scheduler lacks. RQ would wait for minutes."""
        has_all_locks = self._queue_names == self.acquired_locks
        if has_all_locks:
            return False
        last_try: Any = self.lock_acquisition_time
        if last_try is None:
            return True
        since_last_try = datetime.now() - last_try
        return bool(since_last_try.total_seconds() > _REACQUIRE_S)

    def enqueue_scheduled_jobs(self) -> None:
        """Enqueue the jobs that are due by Redis' clock. RQ's own method would stop at a job that it cannot read."""
        self._clock.sync(self.connection)
        common = {
            # `now_iso` is the time of this machine, as RQ writes it into jobs. Only `now_ts` decides what is due.
            "now_iso": utcformat(now()),
            "now_ts": repr(self._clock()),
            "registry": "scheduled",
            "most": _BATCH,
        }
        calls = [
            Call("enqueue_due", {"queue": name, **common}) for name in sorted(self._acquired_locks)
        ]
        self._scripts.call_many(calls)

    def start_round(self) -> None:
        """Keep the locks and enqueue due jobs, in a thread. Does nothing while the last round goes on."""
        if not self._is_running:
            self._is_running = True
            self._pool.submit(self._run_round, self._note_round_ended)

    def _run_round(self) -> None:
        """Register the scheduler if necessary, keep its locks and enqueue due jobs. Called in a thread."""
        if not self.pid:
            self.register_birth()
        if self.should_reacquire_locks:
            self.acquire_locks()
        self.heartbeat()
        self.enqueue_scheduled_jobs()

    def _note_round_ended(self, _: None, error: BaseException | None) -> None:
        """Note that the round is over, and whether it failed. Called in a thread."""
        self._is_running = False
        if error is None:
            self._trouble.note_absence()
        else:
            # The scheduler's hash may have expired. Without a pid, the next round registers the scheduler again.
            self.pid = 0
            self._trouble.note(
                type(error).__name__,
                "the scheduler failed (%s); trying again each second",
                shown_error(error),
            )

    def enqueue_once(self) -> None:
        """Enqueue the due jobs of the queues whose locks are free, then give the locks back."""
        try:
            self.acquire_locks()
            self.enqueue_scheduled_jobs()
        finally:
            self.stop()

    def stop(self) -> None:
        """Give the locks back. In an outage of Redis they stay, and expire within a minute."""
        self._pool.close(_REDIS_TIMEOUT_S)
        try:
            super().stop()
        except RedisError as error:
            self.log.error("the scheduler: could not give its locks back (%s)", error)
