"""Threads in which long prompts are tokenized, so that no step of the engine waits for them."""

import threading
from collections import Counter, deque
from collections.abc import Callable
from typing import Protocol

MAX_OVERTAKES = 19
"""A lane that waits gets at least one turn in twenty, as in the engine's scheduler."""


class Preparable(Protocol):
    """What can be prepared in a thread. lane: 0 is the most urgent."""

    @property
    def lane(self) -> int: ...

    def prepare(self) -> None:
        """Do it, once; keep what it raises."""


class Preparer:
    """A pool of daemon threads, started when they are first needed. Those of a lane are begun in order.

    report: called in the pool's threads, each time one is prepared.
    """

    def __init__(self, threads: int, name: str, report: Callable[[], None]) -> None:
        self._num_threads, self._name, self._report = threads, name, report
        self._threads: list[threading.Thread] = []
        self._lanes: dict[int, deque[Preparable]] = {}
        self._overtakes: Counter[int] = Counter()
        self._changed = threading.Condition()
        self._closed = False

    def submit(self, item: Preparable) -> None:
        """Prepare it after those of its lane that wait, and before those of less urgent lanes."""
        with self._changed:
            self._lanes.setdefault(item.lane, deque()).append(item)
            self._changed.notify()
        if not self._threads:
            self._start()

    def drop(self, item: Preparable) -> None:
        """Leave it out, if it has not begun."""
        with self._changed:
            waiting = self._lanes.get(item.lane)
            if waiting is not None and item in waiting:
                waiting.remove(item)

    def close(self) -> None:
        """Begin with no other; the threads end, each when it is through with its last."""
        with self._changed:
            self._closed = True
            self._lanes.clear()
            self._changed.notify_all()

    def join(self, timeout_s: float) -> None:
        """Wait for each of the threads at most `timeout_s`."""
        for thread in self._threads:
            thread.join(timeout_s)

    def _start(self) -> None:
        for number in range(self._num_threads):
            thread = threading.Thread(target=self._serve, name=f"{self._name}-{number}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self) -> None:
        while (item := self._wait_for_next()) is not None:
            item.prepare()
            del item  # and with it the prompt, however long the next one is waited for
            self._report()

    def _wait_for_next(self) -> Preparable | None:
        """Take the next, as soon as there is one; None when the pool is closed."""
        with self._changed:
            while not self._closed:
                lanes = sorted(lane for lane, waiting in self._lanes.items() if waiting)
                if lanes:
                    return self._lanes[self._choose(lanes)].popleft()
                self._changed.wait()
        return None

    def _choose(self, lanes: list[int]) -> int:
        """The most urgent of the lanes, or one that has been overtaken often enough."""
        chosen = next((lane for lane in lanes[1:] if self._overtakes[lane] >= MAX_OVERTAKES), lanes[0])
        self._overtakes[chosen] = 0
        self._overtakes.update(lane for lane in lanes if lane > chosen)
        return chosen
