"""What the shards of one process share: plans, open readers, and the memory that they take."""

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar, cast

#: A run's shards come one after the other: more plans than this are not in use at once.
MAX_PLANS = 4

#: Readers of one file and set of columns; each holds a decoded page of each column. The second one is for
#: shards that are written after those behind them.
MAX_READERS = 2


class ReaderKey(NamedTuple):
    """What makes readers alike: the file's path and its state, and the columns they read."""

    path: str
    state: Hashable
    columns: Hashable = None


class Reader(Protocol):
    """What this module uses of RowReader (jobs/parquet/tables). shard: a Shard of jobs/runs/plans/plan.py."""

    next_row: int

    def reaches(self, shard: Any) -> bool: ...
    def close(self) -> None: ...


P = TypeVar("P")
R = TypeVar("R", bound=Reader)


class SharedFiles:
    """Keeps readers of files while shards of them are open, so that an idle worker holds no file. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._plans: dict[Hashable, _Once] = {}
        self._files: dict[str, _OpenFile] = {}

    def plan(self, key: Hashable, load: Callable[[], P]) -> P:
        """Return a plan as `load` gave it for the same key, which names one state of one file."""
        with self._lock:
            kept = self._plans.setdefault(key, _Once())
            while len(self._plans) > MAX_PLANS:
                del self._plans[next(iter(self._plans))]
        return cast("P", kept.get(load))

    def enter(self, path: str) -> None:
        """Note that a shard of this file is open: it may read the file until it leaves."""
        with self._lock:
            self._files.setdefault(path, _OpenFile()).users += 1

    def leave(self, path: str) -> None:
        """Note that a shard is closed; the last one closes the file's readers."""
        with self._lock:
            file = self._files[path]
            file.users -= 1
            if file.users > 0:
                return
            del self._files[path]
        for kind in file.kinds.values():
            kind.close_idle()

    def close_idle(self) -> None:
        """Close the readers that nobody uses now, for the memory that they keep."""
        with self._lock:
            kinds = [kind for file in self._files.values() for kind in file.kinds.values()]
        for kind in kinds:
            kind.close_idle(wait=False)

    @contextmanager
    def reader(self, key: ReaderKey, shard: Any, open_reader: Callable[[], R]) -> Iterator[R]:
        """Lend a reader that has not passed a shard, one of a kind at a time; an error closes it."""
        with self._lock:
            file = self._files[key.path]
            kind = file.kinds.setdefault(key, _Kind())
        with kind.lent:
            reader = cast("R | None", kind.take(shard))  # of one kind, they are of one type
            if reader is None:
                reader = open_reader()
            try:
                yield reader
            except BaseException:  # it may have read what is not the planned file
                reader.close()
                raise
            kind.idle.append(reader)


class _Once:
    """What is loaded once: no two threads read the same file for it."""

    def __init__(self) -> None:
        self._loading = threading.Lock()
        self._found: Any = None

    def get(self, load: Callable[[], Any]) -> Any:
        with self._loading:
            if self._found is None:
                self._found = load()
            return self._found


@dataclass
class _Kind:
    """The readers that are alike. idle: belongs to who holds `lent`, which whoever uses a reader does."""

    lent: threading.RLock = field(default_factory=threading.RLock)
    idle: list[Reader] = field(default_factory=list)

    def close_idle(self, wait: bool = True) -> None:
        """Close readers that nobody uses. wait: until nobody else does it; without it, nothing is done then."""
        if self.lent.acquire(blocking=wait):
            try:
                while self.idle:
                    self.idle.pop().close()
            finally:
                self.lent.release()

    def take(self, shard: Any) -> Reader | None:
        """Take the reader nearest before a shard, if one is nearer than a new one; where none is, make room for one."""
        self.idle.sort(key=lambda each: each.next_row)
        reader = next((each for each in reversed(self.idle) if each.reaches(shard)), None)
        if reader is not None:
            self.idle.remove(reader)
        elif len(self.idle) == MAX_READERS:
            self.idle.pop(0).close()
        return reader


@dataclass
class _OpenFile:
    """A file of which shards are open: how many, and its readers."""

    users: int = 0
    kinds: dict[ReaderKey, _Kind] = field(default_factory=dict)


#: Room for 250,000 prompts of 1 KB in a shard.
DEFAULT_BYTES = 256 << 20

#: Of the limit, held in prompts before no further shard begins: what is left is for those that have begun.
BEGIN_SHARE = 2


class NoRoomYet(Exception):
    """Raised where a shard must wait until others have let go of memory: begin again later."""


class ShardBytes:
    """Counts the bytes that open shards hold: of prompts, and of files that are being read. Thread-safe.

    limit: of the prompts of all shards together (held), and as much again of all files that are read (reading). Who
    would be beyond it waits, and holds nothing meanwhile. Alone, nobody waits: a file's own bounds hold then.
    """

    def __init__(self, limit: int = DEFAULT_BYTES) -> None:
        self.limit = limit
        self._lock = threading.Lock()
        self.held = self.reading = 0

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

    def reserve_reading(self, num_bytes: int) -> bool:
        """Reserve bytes for a reader, negative ones to give back; return whether there is room."""
        with self._lock:
            if num_bytes > 0 and self.reading > 0 and self.reading + num_bytes > self.limit:
                return False
            self.reading += num_bytes
            return True
