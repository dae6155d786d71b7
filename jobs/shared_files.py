"""What the shards that one process runs share of their run's files: the parsed plan, and open readers."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .parquet.plan import Plan, Shard
    from .parquet.row_reader import RowReader

#: A run's shards come one after the other: more plans than this are not in use at once.
MAX_PLANS = 4

#: A file's path, and what else makes its readers alike: the file's state and the columns.
ReaderKey = tuple[str, Hashable]

#: Idle readers kept of one file and set of columns; each holds a decoded page of each column.
MAX_IDLE_READERS = 2


class SharedFiles:
    """Keeps the work of a shard independent of how many shards and row groups its run has. Thread-safe.

    Readers stay open only while a shard of their file is open, so that an idle worker holds no file.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._plans: dict[Hashable, Plan] = {}
        self._idle: dict[ReaderKey, list[RowReader]] = {}
        self._users: Counter[str] = Counter()

    def plan(self, key: Hashable, load: Callable[[], Plan]) -> Plan:
        """Return a plan as `load` gave it for the same key, which names one state of one file."""
        with self._lock:
            if key in self._plans:
                return self._plans[key]
        plan = load()
        with self._lock:
            self._plans[key] = plan
            while len(self._plans) > MAX_PLANS:
                del self._plans[next(iter(self._plans))]
        return plan

    def enter(self, path: str) -> None:
        """A shard of this file is open: readers of it may be kept."""
        with self._lock:
            self._users[path] += 1

    def leave(self, path: str) -> None:
        """The shard is closed; the last one closes the file's readers."""
        with self._lock:
            self._users[path] -= 1
            if self._users[path] > 0:
                return
            del self._users[path]
            keys = [key for key in self._idle if key[0] == path]
            readers = [reader for key in keys for reader in self._idle.pop(key)]
        for reader in readers:
            reader.close()

    def take(self, key: ReaderKey, shard: Shard) -> RowReader | None:
        """Take the idle reader that is nearest before a shard, if one is nearer than a new one would be."""
        with self._lock:
            idle = self._idle.get(key, [])
            reader = max(
                (each for each in idle if each.reaches(shard)), key=lambda each: each.next_row, default=None
            )
            if reader is not None:
                idle.remove(reader)
            return reader

    def give_back(self, key: ReaderKey, reader: RowReader) -> None:
        """Keep a reader for the shards that follow; the one that is furthest behind makes room."""
        path, _ = key
        with self._lock:
            is_used = path in self._users
            idle = sorted([*self._idle.get(key, []), reader], key=lambda each: each.next_row)
            surplus = idle[:-MAX_IDLE_READERS] if is_used else idle
            if is_used:
                self._idle[key] = idle[-MAX_IDLE_READERS:]
        for each in surplus:
            each.close()
