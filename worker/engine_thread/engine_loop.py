"""The main thread's loop: take orders, step the engine, hand out finished requests."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from engine import Completion
from worker.engine_thread.intake import Intake
from worker.engine_thread.orders import Abort, Add, EngineDied, Halt, Look, Order, SoFar, Stepped, Tell

if TYPE_CHECKING:
    from engine import Engine

STATS_PERIOD_S = 1.0
SWITCH_INTERVAL_S = 0.0002
"""How long Python code of another thread may keep the engine's thread from going on after a step. CPython's
own 5 ms is more than a step takes on a GPU."""
WAKE_PERIOD_S = 0.5
"""An idle main thread wakes up this often to see signals: one sent while the process was stopped may have
gone to another thread, and then nothing interrupts the wait here."""


class EngineLoop:
    """Steps one engine by orders. `run()` belongs to the thread that made the engine."""

    def __init__(
        self,
        engine: Engine,
        orders: SimpleQueue[Order],
        report: Callable[[Stepped | SoFar | EngineDied], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine, self._orders, self._report, self._clock = engine, orders, report, clock
        self._intake = Intake(engine, lambda: orders.put(Look()))
        self._refused: list[Completion] = []
        self._is_stopped = False
        self._reported_at = self._progress_at = self.turned_at = clock()

    def run(self) -> None:
        """Work until a Halt order. An engine that raises is reported once; then only Halt is awaited."""
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        try:
            while self.turn():
                pass
        except Exception as error:  # noqa: BLE001  # whatever it was, its jobs must be given back
            self._report(EngineDied(error))
            while not isinstance(self._orders.get(), Halt):
                pass
        finally:
            self._intake.close()

    def turn(self) -> bool:
        """Take the orders that wait, step once, report the finished requests. False after a Halt."""
        if not self._take_orders():
            return False
        began_at = self.turned_at = self._clock()
        if self._engine.has_unfinished and not self._is_stopped:
            finished = self._engine.step()
            self._hand_out(finished, self._engine.started, began_at)
        else:
            self._hand_out([], [], began_at)
        return True

    def _take_orders(self) -> bool:
        """Take all waiting orders, or wait for one if idle, then requests for a turn; False: leave."""
        wait = self._is_stopped or not (self._engine.has_unfinished or self._refused or self._intake.has_ready)
        while True:
            try:
                order = self._orders.get(wait, WAKE_PERIOD_S)
            except Empty:
                break
            if isinstance(order, Halt):
                return False
            self._carry_out(order)
            wait = False
        self._refused += self._intake.admit()
        return True

    def _carry_out(self, order: Add | Abort | Look | Tell) -> None:
        if isinstance(order, Add):
            self._intake.put(order)
        elif isinstance(order, Abort):
            self._intake.drop(order.request_ids)
            for request_id in order.request_ids:
                self._engine.abort(request_id)
        elif isinstance(order, Tell):
            if order.stops and not self._is_stopped:
                self._is_stopped, self._reported_at = True, float("-inf")  # the last statistics are told
                self._hand_out(self._engine.step(launches=False), self._engine.started, self._clock())
            self._report(SoFar(self._engine.samples_so_far()))

    def _hand_out(self, finished: list[Completion], started: Sequence[str], began_at: float) -> None:
        faults = self._intake.take_faults()
        if finished or started or self._refused or faults or began_at - self._reported_at >= STATS_PERIOD_S:
            completions, self._refused = self._refused + finished, []
            self._intake.begun([*started, *(each.request_id for each in finished)])
            self._reported_at = began_at
            stats = dict(vars(self._engine.stats()))
            stats["num_waiting"] += len(self._intake)
            progress = None
            if began_at - self._progress_at >= STATS_PERIOD_S:
                self._progress_at, progress = began_at, self._engine.progress()
            self._report(Stepped(completions, stats, started, began_at, progress, faults))
