"""The occasional duties that a worker does for all workers."""

from functools import partial
from typing import Any

from jobs.common.display import shown_error
from jobs.queues.numbers import QueueNumbers, read_numbers
from worker.io_thread.limits import Timer
from worker.io_thread.parts import Parts
from worker.logs import LastingTrouble
from worker.store.queue_order import PERIOD_S, QueueOrder
from worker.store.registries import Registries
from worker.store.scheduler import Scheduler

# Seconds between two rounds of each duty.
_SCHEDULER_PERIOD_S = 1.0
_LEFT_JOBS_PERIOD_S = 10.0
_NUMBERS_PERIOD_S = 15.0
_ADAPTERS_PERIOD_S = 2.0


class Maintenance:
    """Cleans RQ's registries, queues jobs that were left behind, keeps queues in a fair order, and finds new adapters.

    period_s: seconds between two cleanings.
    scheduler: if given, this class runs the scheduler and reads the numbers for the queues' metrics.
    """

    def __init__(self, parts: Parts, scheduler: Scheduler | None, period_s: float) -> None:
        self._queue_names = parts.queue_names
        self._client = parts.clients.pool
        self._pool = parts.enders
        self._tally = parts.tally
        self._scheduler = scheduler
        self._registries = Registries(parts.clients.pool, parts.redis_clock)
        self._queue_order = QueueOrder(parts.clients.pool, parts.redis_clock)
        self._trouble = LastingTrouble(parts.log, "Redis is cleaned up again")

        self._schedule_timer = Timer(_SCHEDULER_PERIOD_S)
        self._numbers_timer = Timer(_NUMBERS_PERIOD_S)
        self._left_jobs_timer = Timer(_LEFT_JOBS_PERIOD_S)
        self._order_timer = Timer(PERIOD_S)
        self._clean_timer = Timer(period_s)

        self._adapters = parts.environment.shared_context.adapters
        self._adapter_timer = Timer(_ADAPTERS_PERIOD_S)
        self._adapter_trouble = LastingTrouble(
            parts.log, "the folder of adapters can be read again"
        )
        self._is_refreshing_adapters = False

    def do_what_is_due(self, moment: float) -> None:
        """Start the duties that are due at `moment` (monotonic seconds)."""
        names = self._queue_names
        if self._scheduler is not None and self._schedule_timer.due(moment):
            self._scheduler.start_round()
        if self._scheduler is not None and self._numbers_timer.due(moment):
            self._pool.submit(partial(read_numbers, self._client, names), self._note_numbers)
        if self._left_jobs_timer.due(moment):
            self._pool.submit(partial(self._registries.queue_left_behind, names), self._report)
        if self._order_timer.due(moment):
            self._pool.submit(partial(self._queue_order.put_in_order, names), self._report)
        may_refresh = self._adapters.is_live and not self._is_refreshing_adapters
        if may_refresh and self._adapter_timer.due(moment):
            self._is_refreshing_adapters = True
            self._pool.submit(self._adapters.refresh, self._note_refreshed)
        if self._clean_timer.due(moment):
            self._pool.submit(partial(self._registries.clean, names), self._report)

    def _note_refreshed(self, _: Any, error: BaseException | None) -> None:
        """Note that the search for adapters is over, and whether it failed."""
        self._is_refreshing_adapters = False
        if error is None:
            self._adapter_trouble.note_absence()
        else:
            self._adapter_trouble.note(
                type(error).__name__, "cannot look for adapters (%s)", shown_error(error)
            )

    def _note_numbers(self, numbers: QueueNumbers | None, error: BaseException | None) -> None:
        """Note the numbers of the queues for the metrics."""
        # After an error `numbers` is None. Old numbers are not kept, because they would pass for new ones.
        self._tally.queue_numbers = numbers
        self._report(numbers, error)

    def _report(self, _: Any, error: BaseException | None) -> None:
        """Log a duty's error, or note that there was none."""
        if error is None:
            self._trouble.note_absence()
        else:
            self._trouble.note(
                type(error).__name__,
                "could not clean up in Redis (%s); trying again in each period",
                shown_error(error),
            )
