"""FunctionPool: threads for everything that may block, such as user functions, callbacks and the files of runs."""

import threading
import time
from collections.abc import Callable
from itertools import count
from queue import PriorityQueue
from typing import Any

from worker.threads.interrupts import Call


class JobStopped(Exception):
    """Raised inside the function of a job that was stopped, cancelled or taken over."""


class FunctionPool:
    """Daemon threads that run calls. They never hold up the worker's exit.

    A thread whose call ignores an interrupt can be given up. Another thread takes its place, and the old thread ends
    after its call.
    """

    def __init__(
        self, num_threads: int, name: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._name = name
        self._clock = clock
        # The waiting calls, each with its order (see `submit`) and its number. A None in place of a call ends a thread.
        self._waiting_calls: PriorityQueue[tuple[float, int, Call | None]] = PriorityQueue()
        self._lock = threading.Lock()
        self._running_calls: dict[threading.Thread, Call] = {}
        # Threads whose calls were reported as ended, but still run; see `give_up_stuck`.
        self._stuck: set[threading.Thread] = set()
        # Threads that another thread has replaced, because their call is slow. Each ends after its call; see `relieve`.
        self._relieved: set[threading.Thread] = set()
        self._numbers = count()
        self._threads: list[threading.Thread] = []
        for _ in range(num_threads):
            self._add_thread()

    @property
    def num_stuck(self) -> int:
        """The number of threads that were given up and still run."""
        return len(self._stuck)

    @property
    def num_waiting(self) -> int:
        """The number of calls that wait for a thread."""
        return self._waiting_calls.qsize()

    def _add_thread(self) -> None:
        """Start a thread that serves calls."""
        name = f"{self._name}-{next(self._numbers)}"
        thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _serve(self) -> None:
        """Run calls, until the pool closes or another thread has taken this one's place."""
        thread = threading.current_thread()
        while True:
            _, _, call = self._waiting_calls.get()
            if call is None:
                return
            self._running_calls[thread] = call
            goes_on = call.run()
            del self._running_calls[thread]
            del call  # while this thread waits, it holds nothing that the call has used
            # This thread ends if its call was given up, or if another thread has taken its place.
            if not goes_on or self._drop_if_relieved(thread):
                with self._lock:  # `give_up_stuck` counts the thread as stuck under this lock
                    self._stuck.discard(thread)
                return

    def _drop_if_relieved(self, thread: threading.Thread) -> bool:
        """Drop a thread from the pool if another one has taken its place. Returns whether it was dropped."""
        with self._lock:
            if thread not in self._relieved:
                return False
            self._relieved.discard(thread)
            self._threads.remove(thread)
            return True

    def relieve(self, slow_s: float, max_threads: int) -> None:
        """Start another thread for each call that runs for more than `slow_s` seconds.

        This helps with calls that cannot be interrupted, such as a read from a hanging mount. When such a call ends at
        last, its thread ends too.
        max_threads: the most threads of the pool. Stuck threads do not count.
        """
        for thread, call in list(self._running_calls.items()):
            with self._lock:
                needs_relief = call.running_s > slow_s and thread not in self._relieved
                if not needs_relief or len(self._threads) >= max_threads:
                    continue
                self._relieved.add(thread)
            self._add_thread()

    def interrupt_silent(self, limit_s: float, error: type[Exception]) -> None:
        """Raise `error` in the calls that have given no sign of life for more than `limit_s` seconds."""
        for call in list(self._running_calls.values()):
            if call.pending_interrupt is None and call.silent_s > limit_s:
                call.interrupt(error)

    def submit(
        self,
        function: Callable[[], Any],
        done: Callable[[Any, BaseException | None], None],
        is_interruptible: bool = True,
        discard: Callable[[Any], None] | None = None,
        order: float = 0,
    ) -> Call:
        """Run `function()` in a thread, then `done(value, error)` in the same thread.

        If the call is given up, `done` is called by the thread that gives it up.
        is_interruptible: whether an interrupt is raised within the call; False for our own code, which checks for
        interrupts itself.
        discard: called in the thread with the value of a call that was given up but has returned after all.
        order: calls with a smaller order go first. Calls with the same order run in the order of submission.
        """
        call = Call(function, done, is_interruptible, self._clock, discard)
        self._waiting_calls.put((order, next(self._numbers), call))
        return call

    def give_up_stuck(self, grace_s: float) -> list[str]:
        """Replace the threads whose calls go on for more than `grace_s` seconds after an interrupt.

        Each such call is reported as ended. Returns a text for each call, with its thread and the line of code at which
        it hangs. Only the thread that calls `close` may call this.
        """
        threads_and_lines = []
        for thread, call in list(self._running_calls.items()):
            with self._lock:
                code_line = call.give_up(grace_s)
                if code_line is None:  # the call was not given up
                    continue
                self._stuck.add(thread)
            # `relieve` has already replaced a relieved thread.
            was_relieved = self._drop_if_relieved(thread)
            if not was_relieved:
                self._threads.remove(thread)
                self._add_thread()
            threads_and_lines.append(f"{thread.name} in {code_line}")
        return threads_and_lines

    def end(self) -> None:
        """Let the threads end once they have run all calls that were submitted so far."""
        after_all_calls = float("inf")
        for _ in list(self._threads):
            end_of_thread = (after_all_calls, next(self._numbers), None)
            self._waiting_calls.put(end_of_thread)

    def join(self, timeout_s: float) -> None:
        """Wait until all threads have ended, except stuck ones, but for at most `timeout_s` seconds."""
        until = time.monotonic() + timeout_s
        for thread in list(self._threads):
            thread.join(max(0.0, until - time.monotonic()))

    def close(self, timeout_s: float) -> None:
        """Let the threads run all submitted calls, then end them. Wait at most `timeout_s` seconds for their end."""
        self.end()
        self.join(timeout_s)
