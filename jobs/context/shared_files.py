"""What the jobs of one process share: child processes, plans, open readers, and the bytes that shards may hold."""

import threading
from collections import Counter
from collections.abc import Callable, Container, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

from jobs.context.turns import Turns, WatchedCall, nobody
from sandbox import Pool

CHILDREN = Pool()
"""Children that read tables and render templates."""
DECODERS = Pool()
"""Children that only decode pictures. The decoders are written in C, so these children read nothing else."""


#: The most plans that are kept. Few plans are in use at once, because a run's shards come one after the other.
MAX_PLANS = 4
#: The most readers that are open at once. Each reader has its own child, which holds a decoded page of each column.
MAX_READERS = 4

P = TypeVar("P")
R = TypeVar("R")
#: Names what a reader reads: the path of a file, then values that tell the file's state and the columns.
ReaderKey = tuple[Hashable, ...]


def _path_of(key: ReaderKey) -> Hashable:
    """Return the path of the file that a reader reads."""
    path, *_ = key
    return path


class _IdleReader(NamedTuple):
    """A reader that nobody uses."""

    key: ReaderKey
    reader: Any


class NoRoomYet(Exception):
    """Raised if a shard must wait until other shards have released memory or readers. Begin the shard again later."""


class SharedFiles:
    """Keeps plans, and readers of files that have open shards. Thread-safe.

    current_call: see Turns. num_readers: the number of open readers.
    """

    def __init__(self, current_call: Callable[[], WatchedCall | None] = nobody) -> None:
        self._lock = threading.Lock()
        self._plans: dict[Hashable, Any] = {}
        self._turns = Turns(current_call)
        self._idle: list[_IdleReader] = []  # in the order of their last use
        # The number of open shards of each file, by the file's path.
        self._open_shards = Counter[Hashable]()
        self.num_readers = 0

    def plan(self, key: Hashable, load: Callable[[], P]) -> P:
        """Return a file's plan, which is loaded once. key: names the file and its state. load: reads the plan."""
        with self._turns.at(key):  # one thread loads the plan, and other threads wait
            plan: P | None = self._plans.get(key)
            if plan is None:
                plan = load()
            with self._lock:
                self._plans[key] = plan
                while len(self._plans) > MAX_PLANS:
                    oldest_key = next(iter(self._plans))
                    del self._plans[oldest_key]
            return plan

    def enter(self, path: str) -> None:
        """Note that a shard of this file is open. The shard may read the file until `leave`."""
        with self._lock:
            self._open_shards[path] += 1

    def leave(self, path: str) -> None:
        """Note that a shard is closed. The last shard of a file closes the file's readers."""
        with self._lock:
            self._open_shards[path] -= 1
            if self._open_shards[path] == 0:
                del self._open_shards[path]
        self.close_idle(self._open_shards)

    def close_idle(self, paths_to_keep: Container[Hashable] = ()) -> None:
        """Close the readers that nobody uses. paths_to_keep: the paths of files whose readers stay open."""
        readers_to_close = []
        with self._lock:
            still_idle = []
            for idle in self._idle:
                if _path_of(idle.key) in paths_to_keep:
                    still_idle.append(idle)
                else:
                    readers_to_close.append(idle.reader)
            self._idle = still_idle
        for reader in readers_to_close:
            self._close(reader)

    @contextmanager
    def reader(self, key: ReaderKey, shard: Any, open_reader: Callable[[], R]) -> Iterator[R]:
        """Lend a RowReader (jobs/parquet/tables) for a shard. Raises NoRoomYet if MAX_READERS readers are lent.

        An idle reader of the key is lent if it has not read beyond the shard's start. Otherwise a new reader is opened.
        Only one reader of a key is lent at a time. Other shards wait until it is returned. The reader is closed if the
        body of the `with` raises, or if the file's last shard was closed meanwhile.
        """
        with self._turns.at(key):
            reader = self._take_nearest(key, shard)
            if reader is None:
                reader = self._open(open_reader)
            try:
                yield reader
            except BaseException:  # the reader may have read another file than the planned one
                self._close(reader)
                raise
            with self._lock:
                has_open_shards = _path_of(key) in self._open_shards
                if has_open_shards:
                    self._idle.append(_IdleReader(key, reader))
            if not has_open_shards:
                self._close(reader)

    def _take_nearest(self, key: ReaderKey, shard: Any) -> Any:
        """Take the key's idle reader that has to skip the fewest rows to reach a shard; None if none can reach it."""
        with self._lock:
            candidates = []
            for idle in self._idle:
                if idle.key == key and idle.reader.reaches(shard):
                    candidates.append(idle)
            if not candidates:
                return None
            # No candidate has read beyond the shard's start, so the one that has read most is the nearest.
            nearest = max(candidates, key=lambda idle: idle.reader.next_row)
            self._idle.remove(nearest)
            return nearest.reader

    def _open(self, open_reader: Callable[[], R]) -> R:
        """Open a reader. If MAX_READERS are open, close an idle one first, or raise NoRoomYet if no reader is idle."""
        with self._lock:
            replaced = None
            if self.num_readers >= MAX_READERS:
                if not self._idle:
                    raise NoRoomYet
                replaced = self._idle.pop(0)
            self.num_readers += 1
        try:
            if replaced is not None:
                self._close(replaced.reader)
            return open_reader()
        except BaseException:
            with self._lock:
                self.num_readers -= 1
            raise

    def _close(self, reader: Any) -> None:
        """Close a reader, and subtract it from the open readers."""
        with self._lock:
            self.num_readers -= 1
        reader.close()


#: The default limit of ShardBytes. It is enough for 250,000 prompts of 1 KB.
DEFAULT_BYTES = 256 << 20
#: No further shard begins once the open shards hold 1 / BEGIN_DIVISOR of the limit. The open shards may use the rest.
BEGIN_DIVISOR = 2


class ShardBytes:
    """Counts the bytes of prompts that the open shards hold. Thread-safe.

    limit: the most bytes that the shards may hold together. A shard that would exceed the limit must wait, and hold
    nothing meanwhile. A shard that is alone never waits, because a file has limits of its own.
    """

    def __init__(self, limit: int = DEFAULT_BYTES) -> None:
        self.limit = limit
        self._lock = threading.Lock()
        self.held = 0

    def check_room(self) -> None:
        """Raise NoRoomYet if the open shards hold so many bytes that no further shard may begin."""
        begin_limit = self.limit // BEGIN_DIVISOR
        if self.held >= begin_limit:
            raise NoRoomYet

    def hold(self, num_bytes: int, already_held: int = 0) -> None:
        """Add bytes of prompts that a shard takes. already_held: the bytes that the shard has now. Raises NoRoomYet."""
        with self._lock:
            is_alone = self.held <= already_held  # no other shard holds any bytes
            if not is_alone and self.held + num_bytes > self.limit:
                raise NoRoomYet
            self.held += num_bytes

    def let_go(self, num_bytes: int) -> None:
        """Subtract bytes of prompts that a shard no longer holds."""
        with self._lock:
            self.held -= num_bytes
