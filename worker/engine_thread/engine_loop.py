"""The main thread's loop: it takes orders, steps the engine and reports finished requests."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from engine import Completion
from worker.engine_thread.intake import Intake
from worker.engine_thread.orders import (
    Abort,
    Add,
    EngineDied,
    Halt,
    Order,
    ReportTokens,
    SampledTokens,
    Stepped,
    Texts,
    Wake,
)

if TYPE_CHECKING:
    from engine import Engine

STATS_PERIOD_S = 1.0
"""Seconds between two reports of the engine's counters while no request finishes."""

FOLLOW_PERIOD_S = 0.05
"""Seconds between two reports of growing texts."""

MAX_FOLLOW_SHARE = 0.05
"""The largest share of the engine thread's time for growing texts. If they need more, they are reported less often."""

SWITCH_INTERVAL_S = 0.0002
"""Seconds for which another thread's Python code may hold up the engine's thread after a step. CPython's default of 5
ms is longer than a step on a GPU."""

NEW_OBJECTS = 10_000
"""New objects after which Python's cycle collector runs. With CPython's default of 700, the held jobs made it run
several times for each claim. These runs took a fifth of the processor time of jobs that compute nothing."""

WAKE_PERIOD_S = 0.5
"""Seconds after which an idle main thread wakes up to see signals. A signal that was sent while the process was stopped
may have gone to another thread, and then nothing interrupts the wait."""


class EngineLoop:
    """Follows orders and steps one engine. The thread that made the engine must call `run()`."""

    def __init__(
        self,
        engine: Engine,
        orders: SimpleQueue[Order],
        report: Callable[[Stepped | SampledTokens | Texts | EngineDied], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._orders = orders
        self._report = report
        self._clock = clock
        self._intake = Intake(engine, lambda: orders.put(Wake()))

        # The completions of refused requests. The next report takes them.
        self._refused: list[Completion] = []
        self._is_stopped = False
        # The ids of the requests whose texts are reported as they grow.
        self._followed: set[str] = set()
        # The ids of the requests in which a sample has ended since the last report of growing texts.
        self._newly_ended: set[str] = set()
        # When growing texts are next reported.
        self._follow_at = 0.0

        moment = clock()
        self._reported_at = moment  # when the last report was made
        self._progress_at = moment  # when the last report with progress was made
        self.last_turn_at = moment
        """Monotonic seconds when the last turn began."""

    def run(self) -> None:
        """Work until a Halt order. If the engine raises, report the error once, then wait for Halt."""
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        gc.set_threshold(NEW_OBJECTS)
        try:
            while self.turn():
                pass
        except Exception as error:  # noqa: BLE001  # after any error the jobs must be given back
            self._report(EngineDied(error))
            while not isinstance(self._orders.get(), Halt):
                pass
        finally:
            self._intake.close()

    def turn(self) -> bool:
        """Take the waiting orders, step once, and report the finished requests. Returns False after a Halt."""
        if not self._take_orders():
            return False
        began_at = self._clock()
        self.last_turn_at = began_at
        if self._engine.has_unfinished and not self._is_stopped:
            finished = self._engine.step()
            self._report_step(finished, self._engine.started, began_at)
            if self._followed:
                self._report_texts(finished)
        else:
            self._report_step(finished=[], started=[], began_at=began_at)
        return True

    def _take_orders(self) -> bool:
        """Carry out all waiting orders, then give the engine the requests of one turn. Returns False after a Halt.

        If there is nothing else to do, wait for an order.
        """
        has_work = self._engine.has_unfinished or self._refused or self._intake.has_ready
        # Wait for the first order only. Then take the orders that are in the queue already, without waiting.
        may_wait = self._is_stopped or not has_work
        while True:
            try:
                order = self._orders.get(block=may_wait, timeout=WAKE_PERIOD_S)
            except Empty:
                break
            if isinstance(order, Halt):
                return False
            self._carry_out(order)
            may_wait = False
        self._refused += self._intake.admit()
        return True

    def _carry_out(self, order: Add | Abort | Wake | ReportTokens) -> None:
        """Carry out an order. A Wake only begins a turn, and every turn takes the prepared requests from the intake."""
        if isinstance(order, Add):
            if order.is_followed:
                self._followed.add(order.request_id)
            self._intake.put(order)
        elif isinstance(order, Abort):
            self._followed.difference_update(order.request_ids)
            self._intake.drop(order.request_ids)
            for request_id in order.request_ids:
                self._engine.abort(request_id)
        elif isinstance(order, ReportTokens):
            if order.stops and not self._is_stopped:
                self._is_stopped = True
                self._reported_at = float("-inf")  # so that the last statistics are reported
                # Finish the step that was launched, and launch no further step.
                finished = self._engine.step(launches=False)
                self._report_step(finished, self._engine.started, self._clock())
            self._report(SampledTokens(self._engine.samples_so_far()))

    def _report_texts(self, finished: list[Completion]) -> None:
        """Report the growing texts of followed requests, if it is time."""
        self._newly_ended.update(completion.request_id for completion in finished)
        began_at = self._clock()
        if began_at < self._follow_at:
            return
        texts = self._engine.texts_so_far(self._followed)
        # A request with several samples is followed until its last sample ends. Until then it has a growing text.
        ended_ids = self._newly_ended - texts.keys()
        self._followed -= ended_ids
        self._newly_ended.clear()
        if texts:
            self._report(Texts(texts))
        # Reports of growing texts may take only a small share of the thread's time.
        ended_at = self._clock()
        pause_s = max(FOLLOW_PERIOD_S, (ended_at - began_at) / MAX_FOLLOW_SHARE)
        self._follow_at = ended_at + pause_s

    def _report_step(
        self, finished: list[Completion], started: Sequence[str], began_at: float
    ) -> None:
        """Report a step, if it has news or the last report is old. began_at: when the step began."""
        faults = self._intake.take_faults()
        has_news = finished or started or self._refused or faults
        if not has_news and began_at - self._reported_at < STATS_PERIOD_S:
            return

        self._reported_at = began_at
        completions = self._refused + finished
        self._refused = []
        finished_ids = [completion.request_id for completion in finished]
        self._intake.note_begun_or_ended([*started, *finished_ids])

        stats = dict(vars(self._engine.stats()))
        stats["num_waiting"] += len(self._intake)  # the engine does not know these requests yet
        progress = None
        if began_at - self._progress_at >= STATS_PERIOD_S:
            self._progress_at = began_at
            progress = self._engine.progress()
        self._report(Stepped(completions, stats, started, began_at, progress, faults))
