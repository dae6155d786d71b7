"""What the jobs of one process share: children, plans, open readers, and the memory that shards take."""

import threading
from collections import Counter
from collections.abc import Callable, Container, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from jobs.context.turns import Caller, Turns, nobody
from sandbox import Pool

CHILDREN = Pool()
DECODERS = Pool()
"""Children that only decode pictures, whose readers are in C: they see nothing else."""


#: A run's shards come one after the other: more plans than this are not in use at once.
MAX_PLANS = 4
#: Files that are read at once: each has a child of its own, and holds a decoded page of each column.
MAX_READERS = 4

P = TypeVar("P")
R = TypeVar("R")
#: The path of a file, then what names its state, and columns.
ReaderKey = tuple[Hashable, ...]


class NoRoomYet(Exception):
    """Raised where a shard must wait until others have let go of memory: begin again later."""


class SharedFiles:
    """Keeps readers of files while shards of them are open, so that an idle worker holds no file. Thread-safe.

    current_call: see Turns.
    """

    def __init__(self, current_call: Callable[[], Caller | None] = nobody) -> None:
        self._lock = threading.Lock()
        self._plans: dict[Hashable, Any] = {}
        self._turns = Turns(current_call)
        self._idle: list[tuple[ReaderKey, Any]] = []  # the one used last comes last
        self._users = Counter[Hashable]()
        self.num_readers = 0

    def plan(self, key: Hashable, load: Callable[[], P]) -> P:
        """Return a plan as `load` gave it for the same key, which names one state of one file."""
        with self._turns.at(key):  # one thread reads it, the others wait
            plan: P = self._plans.get(key) or load()
            with self._lock:
                self._plans[key] = plan
                while len(self._plans) > MAX_PLANS:
                    del self._plans[next(iter(self._plans))]
            return plan

    def enter(self, path: str) -> None:
        """Note that a shard of this file is open: it may read the file until it leaves."""
        with self._lock:
            self._users[path] += 1

    def leave(self, path: str) -> None:
        """Note that a shard is closed; the last one closes the file's readers."""
        with self._lock:
            self._users[path] -= 1
            self._users += Counter()  # those of none go
        self.close_idle(self._users)

    def close_idle(self, but: Container[Hashable] = ()) -> None:
        """Close the readers that nobody uses, but those of some files."""
        with self._lock:
            unused = [each for each in self._idle if each[0][0] not in but]
            self._idle = [each for each in self._idle if each not in unused]
        for _, reader in unused:
            self._close(reader)

    @contextmanager
    def reader(self, key: ReaderKey, shard: Any, open_reader: Callable[[], R]) -> Iterator[R]:
        """Lend a RowReader (jobs/parquet/tables) that has not passed a shard: the nearest one, or a new one.

        One of a kind at a time: a shard waits for the one before it. What the body raises closes the reader, and so
        does a shard that was closed meanwhile. Raises NoRoomYet where MAX_READERS are lent.
        """
        with self._turns.at(key):
            reader = self._nearest(key, shard) or self._opened(open_reader)
            try:
                yield reader
            except BaseException:  # it may have read what is not the planned file
                self._close(reader)
                raise
            with self._lock:
                if is_used := key[0] in self._users:
                    self._idle.append((key, reader))
            if not is_used:
                self._close(reader)

    def _nearest(self, key: ReaderKey, shard: Any) -> Any:
        with self._lock:
            alike = [each for each in self._idle if each[0] == key and each[1].reaches(shard)]
            found = max(alike, key=lambda each: each[1].next_row, default=None)
            if found is None:
                return None
            self._idle.remove(found)
            return found[1]

    def _opened(self, open_reader: Callable[[], R]) -> R:
        with self._lock:
            if self.num_readers >= MAX_READERS and not self._idle:
                raise NoRoomYet
            unused = self._idle.pop(0)[1] if self.num_readers >= MAX_READERS else None
            self.num_readers += 1
        try:
            if unused is not None:
                self._close(unused)
            return open_reader()
        except BaseException:
            with self._lock:
                self.num_readers -= 1
            raise

    def _close(self, reader: Any) -> None:
        with self._lock:
            self.num_readers -= 1
        reader.close()


#: Room for 250,000 prompts of 1 KB in a shard.
DEFAULT_BYTES = 256 << 20
#: No further shard begins once open ones hold this part of the limit (1 / BEGIN_SHARE): the rest is theirs.
BEGIN_SHARE = 2


class ShardBytes:
    """Counts the bytes of prompts that open shards hold (held), at most `limit` together. Thread-safe.

    Who would be beyond it waits, and holds nothing meanwhile. Alone, nobody waits: a file's own bounds hold then.
    """

    def __init__(self, limit: int = DEFAULT_BYTES) -> None:
        self.limit = limit
        self._lock = threading.Lock()
        self.held = 0

    def check_room(self) -> None:
        """Raise NoRoomYet while the open shards hold so many prompts that a further one might not fit."""
        if self.held >= self.limit // BEGIN_SHARE:
            raise NoRoomYet

    def hold(self, num_bytes: int, own: int = 0) -> None:
        """Count bytes of prompts; own: what the caller holds already. Raises NoRoomYet."""
        with self._lock:
            if self.held > own and self.held + num_bytes > self.limit:
                raise NoRoomYet
            self.held += num_bytes

    def let_go(self, num_bytes: int) -> None:
        with self._lock:
            self.held -= num_bytes
