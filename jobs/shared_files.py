"""What the shards that one process runs share of their run's files: plan, footers, and open readers."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from .parquet.plan import Plan, Shard
    from .parquet.row_reader import RowReader

#: A run's shards come one after the other: more plans than this are not in use at once.
MAX_PLANS = 4

#: Idle readers kept of one file and set of columns; each holds a decoded page of each column.
MAX_IDLE_READERS = 2


class ReaderKey(NamedTuple):
    """What makes readers alike: the file's path and its state, and the columns they read."""

    path: str
    state: Hashable
    columns: Hashable = None


class SharedFiles:
    """Keeps the work of a shard independent of how many shards and row groups its run has. Thread-safe.

    Readers stay open only while a shard of their file is open, so that an idle worker holds no file.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._parsing = threading.Lock()  # so that no two threads parse the same plan or footer
        self._plans: dict[Hashable, Plan] = {}
        self._footers: dict[tuple[str, Hashable], Any] = {}
        self._idle: dict[ReaderKey, list[RowReader]] = {}
        self._users: Counter[str] = Counter()

    def plan(self, key: Hashable, load: Callable[[], Plan]) -> Plan:
        """Return a plan as `load` gave it for the same key, which names one state of one file."""
        with self._parsing:
            if key not in self._plans:
                self._plans[key] = load()
                while len(self._plans) > MAX_PLANS:
                    del self._plans[next(iter(self._plans))]
            return self._plans[key]

    def enter(self, path: str) -> None:
        """A shard of this file is open: readers of it may be kept."""
        with self._lock:
            self._users[path] += 1

    def leave(self, path: str) -> None:
        """The shard is closed; the last one closes the file's readers and forgets its footer."""
        with self._lock:
            self._users[path] -= 1
            if self._users[path] > 0:
                return
            del self._users[path]
            keys = [key for key in self._idle if key.path == path]
            readers = [reader for key in keys for reader in self._idle.pop(key)]
            for file in [file for file in self._footers if file[0] == path]:
                del self._footers[file]
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

    def open(self, key: ReaderKey, open_reader: Callable[[Any], RowReader]) -> RowReader:
        """Return a new reader, which `open_reader` opens with the footer (pyarrow's FileMetaData) that the
        file's other readers have parsed, or with None.

        The footer of a file of a thousand row groups takes a megabyte, and a millisecond to parse.
        """
        file = key.path, key.state
        with self._parsing:
            reader = open_reader(self._footers.get(file))
            with self._lock:
                if key.path in self._users:
                    self._footers[file] = reader.footer
        return reader

    def give_back(self, key: ReaderKey, reader: RowReader) -> None:
        """Keep a reader for the shards that follow; the one that is furthest behind makes room."""
        with self._lock:
            is_used = key.path in self._users
            idle = sorted([*self._idle.get(key, []), reader], key=lambda each: each.next_row)
            surplus = idle[:-MAX_IDLE_READERS] if is_used else idle
            if is_used:
                self._idle[key] = idle[-MAX_IDLE_READERS:]
        for each in surplus:
            each.close()
