"""Pool: lends child processes, and replaces those that have ended."""

import atexit
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from sandbox.process import Child, ChildDied

#: The most idle children. A child that comes back while as many are idle is ended. With fewer than the files that are
#: read at once, children would import pyarrow anew for each part of a run.
MAX_IDLE = 4

T = TypeVar("T")


class Pool:
    """Lends child processes of one kind, as many as are needed at once. Thread-safe.

    set_up: called with each new child.
    """

    def __init__(self, set_up: Callable[[Child], None] | None = None) -> None:
        self._set_up = set_up
        self._lock = threading.Lock()
        self._idle: list[Child] = []
        self._busy: set[Child] = set()
        self._is_closed = False
        _pools.add(self)

    def call(self, use: Callable[[Child], T]) -> T:
        """Call `use` with a child and return its value. If the child dies, call it once more with another one.

        Raises ChildFailed, OSError if no child can be started, and the errors of `use`.
        """
        try:
            with self.lent() as child:
                return use(child)
        except ChildDied:
            if self._is_closed:
                raise
        with self.lent() as child:
            return use(child)

    @contextmanager
    def lent(self) -> Iterator[Child]:
        """Lend a child. An error in the `with` block ends the child: a late reply would reach the child's next user."""
        child, is_new = self._take()
        try:
            if is_new and self._set_up is not None:
                self._set_up(child)
            yield child
        except BaseException:
            with self._lock:
                self._busy.discard(child)
            child.close()
            raise
        self._give_back(child)

    def _take(self) -> tuple[Child, bool]:
        """Return a child, and whether it is new."""
        with self._lock:
            while self._idle:
                child = self._idle.pop()
                if child.is_alive:
                    self._busy.add(child)
                    return child, False
                child.close()
        child = Child()
        with self._lock:
            self._busy.add(child)
            if self._is_closed:
                child.kill()
        return child, True

    def _give_back(self, child: Child) -> None:
        """Keep a child for the next task, or end it if enough children are idle."""
        with self._lock:
            self._busy.discard(child)
            if not self._is_closed and child.is_alive and len(self._idle) < MAX_IDLE:
                self._idle.append(child)
                return
        child.close()

    def close(self, *, kill: bool = False) -> None:
        """End the children. Busy ones end when their task has replied, or at once with `kill`."""
        with self._lock:
            self._is_closed = True
            idle = self._idle
            self._idle = []
            if kill:
                for child in self._busy:
                    child.kill()
        for child in idle:
            child.close()


_pools: weakref.WeakSet[Pool] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for pool in list(_pools):
        pool.close(kill=True)
