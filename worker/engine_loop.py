"""The main thread's loop: take orders, step the engine, hand out what it finished.

Orders and reports are plain data in two queues, so that the engine can move to a process of its own.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from engine import Completion, ModelIdentity, SamplingParams
from worker.intake import Intake

STATS_PERIOD_S = 1.0
SWITCH_INTERVAL_S = 0.0002
"""How long Python code of another thread may keep the engine's thread from going on after a step. CPython's
own 5 ms is more than a step takes on a GPU."""
WAKE_PERIOD_S = 0.5
"""An idle main thread wakes up this often to see signals: one sent while the process was stopped may have
gone to another thread, and then nothing interrupts the wait here."""


class EngineLike(Protocol):
    """What the worker uses of `engine.Engine`."""

    @property
    def identity(self) -> ModelIdentity:
        """What tells the model from another."""
        ...

    @property
    def attention_backend(self) -> str:
        """Name of what computes attention."""
        ...

    @property
    def has_unfinished(self) -> bool:
        """Whether a step has anything to do."""
        ...

    def add(self, request_id: str, prompt: Any, params: SamplingParams, *, lane: int = 0) -> None:
        """Queue a request: text, token ids or what `prepare` made of them. Raises InvalidRequest."""

    def prepare(self, prompt: str | list[int]) -> Any:
        """The part of `add` that takes time with the prompt's length; for any thread, as `chat_token_ids`."""
        ...

    def abort(self, request_id: str) -> None:
        """Forget a request."""

    def step(self) -> list[Completion]:
        """Run one step; return what finished in it."""
        ...

    @property
    def started(self) -> Sequence[str]:
        """Ids of requests that the last step scheduled for the first time, some perhaps more than once."""
        ...

    def stats(self) -> Any:
        """A dataclass of counters."""
        ...

    def chat_token_ids(self, messages: list[dict[str, Any]]) -> list[int]:
        """Render messages with the model's chat template."""
        ...

    def close(self) -> None:
        """Free the model and the cache."""


@dataclass(frozen=True, slots=True)
class Add:
    """Order: run one prompt (or the messages of a chat) on a lane."""

    request_id: str
    prompt: str | list[int] | None
    messages: list[dict[str, Any]] | None
    sampling: Mapping[str, Any]
    lane: int


@dataclass(frozen=True, slots=True)
class Abort:
    """Order: drop requests; nothing more is reported of them."""

    request_ids: Sequence[str]


@dataclass(frozen=True, slots=True)
class Look:
    """Order: a thread of the loop's own has prepared a prompt."""


@dataclass(frozen=True, slots=True)
class Halt:
    """Order: leave the loop."""


@dataclass(frozen=True, slots=True)
class Stepped:
    """Report: completions of one or more steps, and the engine's counters after them.

    started: ids of the requests of which a step has scheduled the first sequence. at: monotonic seconds when
    the last step began.
    """

    completions: Sequence[Completion]
    stats: Mapping[str, int]
    started: Sequence[str]
    at: float


@dataclass(frozen=True, slots=True)
class EngineDied:
    """Report: a step raised; nothing that was in the engine will be completed."""

    error: BaseException


Order = Add | Abort | Look | Halt


class EngineLoop:
    """Steps one engine for whoever sends orders. `run()` belongs to the thread that made the engine."""

    def __init__(
        self,
        engine: EngineLike,
        orders: SimpleQueue[Order],
        report: Callable[[Stepped | EngineDied], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine, self._orders, self._report, self._clock = engine, orders, report, clock
        self._intake = Intake(engine, lambda: orders.put(Look()))
        self._refused: list[Completion] = []
        self._reported_at = clock()

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
        """Take the orders that wait, step once, report what finished. False where a Halt was among them."""
        if not self._take_orders():
            return False
        began_at = self._clock()
        if self._engine.has_unfinished:
            finished = self._engine.step()
            self._hand_out(finished, self._engine.started, began_at)
        else:
            self._hand_out([], [], began_at)
        return True

    def _take_orders(self) -> bool:
        """Take all orders that wait, then requests as a turn has time for; False: leave.

        Where there is nothing to do, wait for an order.
        """
        wait = not (self._engine.has_unfinished or self._refused or self._intake.has_ready)
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

    def _carry_out(self, order: Add | Abort | Look) -> None:
        if isinstance(order, Add):
            self._intake.put(order)
        elif isinstance(order, Abort):
            self._intake.drop(order.request_ids)
            for request_id in order.request_ids:
                self._engine.abort(request_id)

    def _hand_out(self, finished: list[Completion], started: Sequence[str], began_at: float) -> None:
        if finished or started or self._refused or began_at - self._reported_at >= STATS_PERIOD_S:
            completions, self._refused = self._refused + finished, []
            self._reported_at = began_at
            stats = asdict(self._engine.stats())
            stats["num_waiting"] += len(self._intake)
            self._report(Stepped(completions, stats, started, began_at))
