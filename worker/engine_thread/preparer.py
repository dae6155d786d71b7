"""Threads in which long prompts are tokenized, so that no step of the engine waits for them."""

import threading
from collections.abc import Callable
from itertools import count
from queue import PriorityQueue
from typing import Protocol


class Preparable(Protocol):
    """What can be prepared in a thread.

    lane: 0 is the most urgent. is_dropped: nobody waits for it any more.
    """

    lane: int
    is_dropped: bool

    def prepare(self) -> None:
        """Do it, once; keep what it raises."""


class Preparer:
    """Daemon threads, started when they are first needed, that take the most urgent lane's oldest.

    report: called in these threads, each time one is prepared.
    """

    def __init__(self, threads: int, name: str, report: Callable[[], None]) -> None:
        self._num_threads, self._name, self._report = threads, name, report
        self._threads: list[threading.Thread] = []
        self._waiting: PriorityQueue[tuple[int, int, Preparable | None]] = PriorityQueue()
        self._numbers = count()
        self._is_closed = False

    def submit(self, item: Preparable) -> None:
        """Prepare it after those of its lane that wait, and before those of less urgent lanes."""
        self._waiting.put((item.lane, next(self._numbers), item))
        if not self._threads:
            for number in range(self._num_threads):
                thread = threading.Thread(target=self._serve, name=f"{self._name}-{number}", daemon=True)
                self._threads.append(thread)
                thread.start()

    def close(self) -> None:
        """Begin with no other; the threads end, each when it is through with its last."""
        self._is_closed = True
        for _ in self._threads:
            self._waiting.put((-1, next(self._numbers), None))

    def join(self, timeout_s: float) -> None:
        """Wait for each of the threads at most `timeout_s`."""
        for thread in self._threads:
            thread.join(timeout_s)

    def _serve(self) -> None:
        while (item := self._waiting.get()[2]) is not None and not self._is_closed:
            if not item.is_dropped:
                item.prepare()
                self._report()
            del item  # and with it the prompt, however long the next one is waited for
