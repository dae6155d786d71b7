"""Pool: lends children, and starts others in the place of those that ended."""

import atexit
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from sandbox.process import Child, ChildDied

#: Children that wait for a task; those that end theirs while so many wait are let go. With fewer than the files that
#: are read at once, a child would import pyarrow anew for each part of a run.
MAX_IDLE = 4

T = TypeVar("T")


class Pool:
    """Children that are alike: as many as ask at once. Thread-safe.

    set_up: called with a child that has just begun.
    """

    def __init__(self, set_up: Callable[[Child], None] | None = None) -> None:
        self._set_up = set_up
        self._lock = threading.Lock()
        self._idle: list[Child] = []
        self._busy: set[Child] = set()
        self._is_closed = False
        _pools.add(self)

    def call(self, use: Callable[[Child], T]) -> T:
        """Return what a use of a child returns; called again with another one where the first one dies.

        Raises ChildFailed, OSError where none begins, and what `use` raises.
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
        """Lend a child. What the body raises ends it: its reply would be the next one's."""
        child, is_new = self._taken()
        try:
            if is_new and self._set_up is not None:
                self._set_up(child)
            yield child
        except BaseException:
            with self._lock:
                self._busy.discard(child)
            child.close()
            raise
        self._keep(child)

    def _taken(self) -> tuple[Child, bool]:
        """Return a child, and whether it has just begun."""
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

    def _keep(self, child: Child) -> None:
        with self._lock:
            self._busy.discard(child)
            if not self._is_closed and child.is_alive and len(self._idle) < MAX_IDLE:
                self._idle.append(child)
                return
        child.close()

    def close(self, *, kill: bool = False) -> None:
        """End the children; those that are at a task once they have replied, or, with `kill`, at once."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
            for child in self._busy if kill else ():
                child.kill()
        for child in idle:
            child.close()


_pools: weakref.WeakSet[Pool] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for pool in list(_pools):
        pool.close(kill=True)
