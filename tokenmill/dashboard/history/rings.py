"""Rings: values over time, which take up a fixed size in Redis.

Each charted queue, worker and run is a series, with a key of its own. The key's value is three rings, one behind the
other: rows of ten seconds for the last hour, rows of a minute for the last day, and rows of ten minutes for the last
week. A row's number is its time divided by its width. Its index in the ring is that number modulo the ring's length, so
a new row overwrites the oldest one. Each row begins with its number, so that a reader can tell a row of this round from
a row of an earlier round.

Other programs may use the same Redis user as the dashboard, and may have written anything to these keys. The dashboard
reads such bytes as rows too. Then the charts are wrong, but nothing else is.
"""

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from itertools import accumulate
from typing import Any

from redis import Redis
from redis.client import Pipeline

from jobs.common.keys import HISTORY_PREFIX
from jobs.common.stored import text

#: The seconds for which a series is kept after its last row.
TTL_S = 8 * 24 * 3600

#: The seconds without a row after which another series may take a series' place.
SILENT_S = 3600

#: The most characters of a series' name.
MAX_NAME_CHARS = 200

#: The values of a row, in the order of its columns. None stands for an unknown value.
Values = Sequence[float | None]


@dataclass(frozen=True)
class Ring:
    """Rows of one width. The last `num_rows` of them are kept."""

    width_s: int
    num_rows: int


RINGS = (Ring(10, 360), Ring(60, 1440), Ring(600, 1008))

#: The rows that come before each ring in a series; at the end, the rows of the whole series.
_OFFSETS = (0, *accumulate(ring.num_rows for ring in RINGS))


@dataclass(frozen=True)
class Kind:
    """A kind of series.

    columns: the names of a row's values.
    most: the most series of this kind that are kept. All series of KINDS together take at most 5.2 MB.
    peaks: the columns whose highest value is kept when rows are joined into a wider row. The mean of every other column
    is kept.
    """

    name: str
    columns: tuple[str, ...]
    most: int
    peaks: frozenset[str] = frozenset()

    @cached_property
    def row(self) -> struct.Struct:
        """Return the layout of a row: its number, then its values."""
        return struct.Struct(f"<I{len(self.columns)}f")

    @property
    def num_bytes(self) -> int:
        """Return the size of a series."""
        return self.row.size * _OFFSETS[-1]

    @property
    def index_key(self) -> str:
        """Return the key of the index: a sorted set of the names of the series, by the time of their last row."""
        return f"{HISTORY_PREFIX}:index:{self.name}"

    def key(self, series: str) -> str:
        """Return the key of a series."""
        digest = blake2b(series.encode(errors="surrogatepass"), digest_size=12).hexdigest()
        return f"{HISTORY_PREFIX}:{self.name}:{digest}"


_TOKENS = ("generated", "read", "cached")

#: waiting: the number of waiting jobs. oldest_s: the age of the job at the head. ended: jobs that ended, per second.
#: failed: how many of these did not finish successfully. waited_s, ran_s: the sum of the seconds that the ended jobs
#: waited and ran.
QUEUE = Kind(
    "queue",
    ("waiting", "oldest_s", "ended", "failed", "waited_s", "ran_s"),
    most=20,
    peaks=frozenset({"oldest_s"}),
)

#: Tokens per second.
WORKER = Kind("worker", _TOKENS, most=50)

#: Tokens per second of all workers together. The only series is named ALL.
FLEET = Kind("fleet", _TOKENS, most=1)
ALL = "all"

#: Rows, errors and tokens per second.
RUN = Kind("run", ("rows", "errors", "tokens"), most=20)

KINDS = (QUEUE, WORKER, FLEET, RUN)


class Rings:
    """Reads and writes series in Redis. A series has rows of values, each with a number that stands for its time."""

    def __init__(self, connection: Redis) -> None:
        self._connection = connection

    def names(self, kind: Kind, since: float) -> dict[str, float]:
        """Return the names of the series that have a row since a moment, the most recent first.

        Each name has the Unix time of its last row.
        """
        entries: Any = self._connection.zrevrange(kind.index_key, 0, kind.most - 1, withscores=True)
        return {text(name): at for name, at in entries if at >= since}

    def admit(self, kind: Kind, names: Iterable[str], now: float) -> list[str]:
        """Make series for new names where there is room. Return the names that have a series now.

        If the kind has its `most` series already, a new series replaces one that has had no row for SILENT_S. The
        longest silent series are replaced first. If there is not room for all new names, the first ones get a series.
        """
        known = self.names(kind, 0)
        admitted = []
        new_names = []
        for name in dict.fromkeys(names):
            if len(name) > MAX_NAME_CHARS:
                continue
            if name in known:
                admitted.append(name)
            else:
                new_names.append(name)

        longest_silent_first = []
        for name, last_at in reversed(known.items()):
            if last_at < now - SILENT_S and name not in admitted:
                longest_silent_first.append(name)

        num_free = kind.most - len(known)
        made = new_names[: num_free + len(longest_silent_first)]
        if not made:
            return admitted
        num_replaced = max(0, len(made) - num_free)
        with self._connection.pipeline(transaction=False) as pipe:
            for name in longest_silent_first[:num_replaced]:
                pipe.delete(kind.key(name))
                pipe.zrem(kind.index_key, name)
            for name in made:
                # The value gets its whole size at once: for a value that grows, Redis would reserve twice as much.
                pipe.delete(kind.key(name))
                pipe.setrange(kind.key(name), kind.num_bytes - 1, "\0")
                pipe.expire(kind.key(name), TTL_S)
                pipe.zadd(kind.index_key, {name: now})
            pipe.execute()
        return [*admitted, *made]

    def read(
        self, kind: Kind, ring: int, names: Sequence[str], first: int, last: int
    ) -> dict[str, dict[int, Values]]:
        """Return the rows of some series whose numbers are from `first` to `last`, by name and number."""
        # Earlier rows have been overwritten.
        first = max(first, last - RINGS[ring].num_rows + 1)
        spans = _spans(ring, first, last)
        size = kind.row.size
        with self._connection.pipeline(transaction=False) as pipe:
            for name in names:
                for start, stop in spans:
                    pipe.getrange(kind.key(name), start * size, stop * size - 1)
            # A key may hold a value of another type, which another program has written.
            replies = iter(pipe.execute(raise_on_error=False))

        rows_by_name: dict[str, dict[int, Values]] = {}
        for name in names:
            rows: dict[int, Values] = {}
            for _ in spans:
                reply = next(replies)
                if not isinstance(reply, bytes):
                    continue
                whole_rows = reply[: len(reply) // size * size]
                for number, *values in kind.row.iter_unpack(whole_rows):
                    if first <= number <= last:
                        rows[number] = [_checked(value) for value in values]
            rows_by_name[name] = rows
        return rows_by_name

    def write(
        self, pipe: Pipeline, kind: Kind, ring: int, name: str, rows: Mapping[int, Values]
    ) -> None:
        """Add commands to a pipeline that write rows of a series. rows: values by the row's number."""
        for number, values in rows.items():
            index = _OFFSETS[ring] + number % RINGS[ring].num_rows
            floats = [math.nan if value is None else value for value in values]
            row = kind.row.pack(number, *floats)
            pipe.setrange(kind.key(name), index * kind.row.size, row)

    def roll_up(self, kind: Kind, ring: int, first: int, last: int) -> None:
        """Write the missing rows from `first` to `last` of a ring. Each is joined from rows of the next finer ring."""
        width_s = RINGS[ring].width_s
        finer = ring - 1
        ratio = width_s // RINGS[finer].width_s
        names = list(self.names(kind, first * width_s))
        first_finer = first * ratio
        last_finer = (last + 1) * ratio - 1
        finer_rows = self.read(kind, finer, names, first_finer, last_finer)
        written_rows = self.read(kind, ring, names, first, last)
        with self._connection.pipeline(transaction=False) as pipe:
            for name in names:
                rows = {}
                for number in range(first, last + 1):
                    if number in written_rows[name]:
                        continue
                    parts = []
                    for finer_number in range(number * ratio, (number + 1) * ratio):
                        if finer_number in finer_rows[name]:
                            parts.append(finer_rows[name][finer_number])
                    if parts:
                        rows[number] = _joined(kind, parts)
                self.write(pipe, kind, ring, name, rows)
                if rows:
                    pipe.expire(kind.key(name), TTL_S)
            pipe.execute()


def _spans(ring: int, first: int, last: int) -> list[tuple[int, int]]:
    """Return where a series holds the rows from `first` to `last` of a ring, as one or two spans.

    A span is the index of its first row and the index after its last row. There are two spans if the rows reach the
    ring's end and go on at its beginning.
    """
    if first > last:
        return []
    num_rows = RINGS[ring].num_rows
    offset = _OFFSETS[ring]
    start = first % num_rows
    stop = start + last - first + 1
    if stop <= num_rows:
        return [(offset + start, offset + stop)]
    return [(offset + start, offset + num_rows), (offset, offset + stop - num_rows)]


def _checked(stored: float) -> float | None:
    """Return a stored value; None if no dashboard writes such a value. Another program may have written any bits."""
    return stored if 0 <= stored < 1e15 else None


def _joined(kind: Kind, rows: Sequence[Values]) -> list[float | None]:
    """Return the values of a wider row that covers these rows."""
    joined: list[float | None] = []
    for index, column in enumerate(kind.columns):
        values = [row[index] for row in rows]
        known = [value for value in values if value is not None]
        if not known:
            joined.append(None)
        elif column in kind.peaks:
            joined.append(max(known))
        else:
            joined.append(sum(known) / len(known))
    return joined
