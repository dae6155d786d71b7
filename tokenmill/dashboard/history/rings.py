"""Rings: values over time at a fixed size in Redis.

Each queue, worker and run that is charted is a series. Its key holds three rings of rows, one behind the other: rows
that are ten seconds wide for the last hour, a minute wide for the last day, ten minutes wide for the last week. A row
stands at the place of its number modulo the ring's length, so a new row takes the place of the oldest one. It begins
with its number, by which a row of an earlier round is told from one of this round.

Whatever stands there is read as rows, and costs no more than the charts. A dashboard may share its user with others.
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

#: How long a series is kept after its last row.
TTL_S = 8 * 24 * 3600

#: The most characters of a series' name.
MAX_NAME_CHARS = 200

#: The values of a row by their column. None stands for what was not told.
Values = Sequence[float | None]


@dataclass(frozen=True)
class Ring:
    """Rows of one width. The last `num_rows` of them are kept."""

    width_s: int
    num_rows: int


RINGS = (Ring(10, 360), Ring(60, 1440), Ring(600, 1008))

_OFFSETS = (0, *accumulate(ring.num_rows for ring in RINGS))


@dataclass(frozen=True)
class Kind:
    """What a series is of.

    columns: the names of a row's values.
    peaks: the columns of which a wider row has the highest value. It has the mean of the others.
    most: the series that are kept. With these bounds all series together take at most 5.2 MB.
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
        """Return the key of the names of the series: a sorted set by the time of the last row."""
        return f"{HISTORY_PREFIX}:index:{self.name}"

    def key(self, series: str) -> str:
        """Return the key of a series."""
        name = blake2b(series.encode(errors="surrogatepass"), digest_size=12).hexdigest()
        return f"{HISTORY_PREFIX}:{self.name}:{name}"


_TOKENS = ("generated", "read", "cached")

#: waiting: jobs. oldest_s: the age of the job at the head. ended, badly: jobs a second. waited_s, ran_s: the time that
#: the jobs ended in a second have waited and run.
QUEUE = Kind(
    "queue",
    ("waiting", "oldest_s", "ended", "badly", "waited_s", "ran_s"),
    most=20,
    peaks=frozenset({"oldest_s"}),
)

#: Tokens a second.
WORKER = Kind("worker", _TOKENS, most=50)

#: Tokens a second of all workers. It has one series.
FLEET = Kind("fleet", _TOKENS, most=1)
ALL = "all"

#: Rows and tokens a second.
RUN = Kind("run", ("rows", "errors", "tokens"), most=20)

KINDS = (QUEUE, WORKER, FLEET, RUN)


class Rings:
    """Reads and writes series."""

    def __init__(self, connection: Redis) -> None:
        self._connection = connection

    def names(self, kind: Kind, since: float) -> dict[str, float]:
        """Return the series that have a row since then, with the time of their last one."""
        stored: Any = self._connection.zrevrange(kind.index_key, 0, kind.most - 1, withscores=True)
        return {text(name): at for name, at in stored if at >= since}

    def admit(self, kind: Kind, names: Iterable[str], now: float) -> list[str]:
        """Return those of the names that have a series, or get one now. The first names come first.

        A new one takes the place of the series that has been without a row for longest, and for an hour at least.
        """
        known = self.names(kind, 0)
        wanted = [name for name in dict.fromkeys(names) if len(name) <= MAX_NAME_CHARS]
        admitted = [name for name in wanted if name in known]
        strangers = [name for name in wanted if name not in known][: kind.most]
        silent = [name for name, at in known.items() if at < now - 3600 and name not in wanted]
        num_free = kind.most - len(known)
        made = strangers[: num_free + len(silent)]
        # The names come with the latest first, so the last ones have been silent for longest.
        num_gone = max(0, len(made) - num_free)
        gone = silent[len(silent) - num_gone :]
        if not made:
            return admitted
        with self._connection.pipeline(transaction=False) as pipe:
            for name in gone:
                pipe.delete(kind.key(name))
                pipe.zrem(kind.index_key, name)
            for name in made:
                # It gets its whole size at once. Redis would set aside twice as much for a text that grows.
                pipe.delete(kind.key(name))
                pipe.setrange(kind.key(name), kind.num_bytes - 1, "\0")
                pipe.expire(kind.key(name), TTL_S)
                pipe.zadd(kind.index_key, {name: now})
            pipe.execute()
        return [*admitted, *made]

    def read(
        self, kind: Kind, ring: int, names: Sequence[str], first: int, last: int
    ) -> dict[str, dict[int, Values]]:
        """Return the rows with numbers from `first` to `last` of some series, by name and number."""
        num_rows = RINGS[ring].num_rows
        first = max(first, last - num_rows + 1)
        begin = first % num_rows
        end = begin + last - first + 1
        # Where the rows go over the ring's end, its beginning follows.
        spans = [(begin, min(end, num_rows)), (0, max(0, end - num_rows))]
        base = _OFFSETS[ring]
        size = kind.row.size
        with self._connection.pipeline(transaction=False) as pipe:
            for name in names:
                for start, stop in spans:
                    if start < stop:
                        pipe.getrange(
                            kind.key(name), (base + start) * size, (base + stop) * size - 1
                        )
            replies = iter(pipe.execute(raise_on_error=False))

        found: dict[str, dict[int, Values]] = {}
        for name in names:
            rows: dict[int, Values] = {}
            for start, stop in spans:
                raw = next(replies) if start < stop else b""
                if not isinstance(raw, bytes):
                    continue  # somebody has put a value of another type there
                for number, *values in kind.row.iter_unpack(raw[: len(raw) // size * size]):
                    if first <= number <= last:
                        rows[number] = [_value(value) for value in values]
            found[name] = rows
        return found

    def write(
        self, pipe: Pipeline, kind: Kind, ring: int, name: str, rows: Mapping[int, Values]
    ) -> None:
        """Add the writing of some rows of a series to a pipeline."""
        for number, values in rows.items():
            place = _OFFSETS[ring] + number % RINGS[ring].num_rows
            numbers = [math.nan if value is None else value for value in values]
            row = kind.row.pack(number, *numbers)
            pipe.setrange(kind.key(name), place * kind.row.size, row)

    def roll_up(self, kind: Kind, ring: int, first: int, last: int) -> None:
        """Write those rows from `first` to `last` of a ring that lack, from the rows of the finer ring before it."""
        width_s = RINGS[ring].width_s
        finer = ring - 1
        ratio = width_s // RINGS[finer].width_s
        names = list(self.names(kind, first * width_s))
        told = self.read(kind, finer, names, first * ratio, (last + 1) * ratio - 1)
        there = self.read(kind, ring, names, first, last)
        with self._connection.pipeline(transaction=False) as pipe:
            for name in names:
                rows = {}
                for number in range(first, last + 1):
                    parts = range(number * ratio, (number + 1) * ratio)
                    known = [told[name][part] for part in parts if part in told[name]]
                    if known and number not in there[name]:
                        rows[number] = _joined(kind, known)
                self.write(pipe, kind, ring, name, rows)
                if rows:
                    pipe.expire(kind.key(name), TTL_S)
            pipe.execute()


def _value(stored: float) -> float | None:
    """Return a value as it may be shown. Whoever may write the keys may have written any bits."""
    return stored if 0 <= stored < 1e15 else None


def _joined(kind: Kind, rows: Sequence[Values]) -> list[float | None]:
    """Return the values of a row that stands for some rows."""
    joined: list[float | None] = []
    for place, column in enumerate(kind.columns):
        known = [value for row in rows if (value := row[place]) is not None]
        if not known:
            joined.append(None)
        elif column in kind.peaks:
            joined.append(max(known))
        else:
            joined.append(sum(known) / len(known))
    return joined
