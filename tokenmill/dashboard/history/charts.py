"""What a page's charts show, as JSON."""

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from redis import Redis

from jobs.common.display import is_unicode, safe_name
from jobs.common.workers import read_workers
from tokenmill.dashboard.history.marks import read_marks
from tokenmill.dashboard.history.rings import (
    ALL,
    FLEET,
    QUEUE,
    RINGS,
    RUN,
    WORKER,
    Kind,
    Rings,
    Values,
)

#: Ranges by their word in addresses: the ring, and how many of its rows.
RANGES = {"15m": (0, 90), "1h": (0, 360), "24h": (1, 1440), "7d": (2, 1008)}

#: Series with a line of their own, those with the highest values; the others are one line together.
MAX_LINES = 6

#: Charts that are kept for whoever asks next, and for how many seconds.
MAX_KEPT = 64
KEPT_S = 5.0

#: Seconds within which a row is written.
LATE_S = 2.0

Line = dict[str, Any]


class Charts:
    """Reads charts. For any thread. clock: Unix seconds."""

    def __init__(self, connection: Redis, clock: Callable[[], float] = time.time) -> None:
        self._connection = connection
        self._rings = Rings(connection)
        self._clock = clock
        self._lock = threading.Lock()
        self._kept: dict[tuple[str, str, str], tuple[float, dict[str, Any]]] = {}

    def read(self, of: str, name: str, range_: str) -> dict[str, Any] | None:
        """Return the charts of a page; None if there are none of that kind. Raises RedisError.

        of: "overview", "queue", "worker" or "run". name: that of the queue, worker or run.
        The answer has `times` in Unix seconds, `width_s` between two of them, `charts`: lists of lines by the chart's
        name, and `marks` of workers. `is_now`: whether the latest values are those of now.
        """
        if of not in _PAGES or range_ not in RANGES:
            return None
        asked = (of, name, range_)
        now = self._clock()
        with self._lock:
            until, charts = self._kept.get(asked, (0.0, {}))
            if now < until:
                return charts
        charts = self._read(of, name, range_, now)
        with self._lock:
            if len(self._kept) >= MAX_KEPT:
                self._kept.clear()
            self._kept[asked] = (now + KEPT_S, charts)
        return charts

    def _read(self, of: str, name: str, range_: str, now: float) -> dict[str, Any]:
        ring, count = RANGES[range_]
        width_s = RINGS[ring].width_s
        # A row of ten seconds is written when it begins, a wider one when it has ended.
        last = int((now - LATE_S) // width_s) - (1 if ring else 0)
        numbers = range(last - count + 1, last + 1)
        since = numbers[0] * width_s
        kinds = _PAGES[of]
        told = {}
        for kind in kinds:
            names = [name] if of != "overview" else list(self._rings.names(kind, since))
            told[kind] = self._rings.read(kind, ring, names, numbers[0], last)
        marks = read_marks(self._connection, since)
        if of == "worker":
            marks = [mark for mark in marks if mark.worker == safe_name(name)]
        return {
            "is_now": of != "worker" or self._tells(name),
            "width_s": width_s,
            "times": [number * width_s for number in numbers],
            "charts": _CHARTS[of](told, numbers, name),
            "marks": [asdict(mark) for mark in marks],
        }

    def _tells(self, worker: str) -> bool:
        """Whether a worker tells of itself now."""
        found = read_workers(self._connection, [worker]) if is_unicode(worker) else []
        return any(each.sample is not None and not each.is_silent for each in found)


#: What is read for each page.
_PAGES: dict[str, tuple[Kind, ...]] = {
    "overview": (QUEUE, WORKER, FLEET),
    "queue": (QUEUE,),
    "worker": (WORKER,),
    "run": (RUN,),
}

#: The rows of a page's series by kind, name and number.
Told = Mapping[Kind, Mapping[str, Mapping[int, Values]]]


def _overview(told: Told, numbers: range, name: str) -> dict[str, list[Line]]:
    return {
        "waiting": _largest(QUEUE, "waiting", told[QUEUE], numbers, "other queues"),
        "workers": _largest(WORKER, "generated", told[WORKER], numbers, "other workers"),
        "tokens": _token_lines(FLEET, told[FLEET].get(ALL, {}), numbers),
    }


def _queue(told: Told, numbers: range, name: str) -> dict[str, list[Line]]:
    rows = told[QUEUE][name]
    waiting, oldest_s, ended, badly, waited_s, ran_s = (
        _column(QUEUE, column, rows, numbers) for column in QUEUE.columns
    )
    return {
        "waiting": [_line("waiting", waiting)],
        "oldest": [_line("oldest", oldest_s)],
        "ended": [_line("finished", _minus(ended, badly)), _line("failed", badly)],
        "latency": [_line("waited", _over(waited_s, ended)), _line("ran", _over(ran_s, ended))],
    }


def _worker(told: Told, numbers: range, name: str) -> dict[str, list[Line]]:
    return {"tokens": _token_lines(WORKER, told[WORKER][name], numbers)}


def _run(told: Told, numbers: range, name: str) -> dict[str, list[Line]]:
    rows = told[RUN][name]
    return {
        "rows": [
            _line(column, _column(RUN, column, rows, numbers)) for column in ("rows", "errors")
        ],
        "tokens": [_line("tokens", _column(RUN, "tokens", rows, numbers))],
    }


_CHARTS: dict[str, Callable[[Told, range, str], dict[str, list[Line]]]] = {
    "overview": _overview,
    "queue": _queue,
    "worker": _worker,
    "run": _run,
}


def _token_lines(kind: Kind, rows: Mapping[int, Values], numbers: range) -> list[Line]:
    return [_line(column, _column(kind, column, rows, numbers)) for column in kind.columns]


def _column(
    kind: Kind, column: str, rows: Mapping[int, Values], numbers: Iterable[int]
) -> list[float | None]:
    place = kind.columns.index(column)
    return [rows[number][place] if number in rows else None for number in numbers]


def _largest(
    kind: Kind, column: str, told: Mapping[str, Mapping[int, Values]], numbers: range, others: str
) -> list[Line]:
    """Return a line for each of the series with the highest values, and one for the others together."""
    columns = {name: _column(kind, column, rows, numbers) for name, rows in told.items()}
    highest = {name: max(filter(None, values), default=0.0) for name, values in columns.items()}
    names = sorted(highest, key=lambda name: (-highest[name], name))
    lines = [_line(safe_name(name), columns[name]) for name in sorted(names[:MAX_LINES])]
    rest = [columns[name] for name in names[MAX_LINES:]]
    if rest:
        lines.append(
            _line(f"{len(rest)} {others}", [_sum(each) for each in zip(*rest, strict=True)])
        )
    return lines


def _line(name: str, values: Sequence[float | None]) -> Line:
    """Return a line as JSON has it, with six digits of each value."""
    return {
        "name": name,
        "values": [None if value is None else float(f"{value:.6g}") for value in values],
    }


def _sum(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _minus(values: Sequence[float | None], others: Sequence[float | None]) -> list[float | None]:
    pairs = zip(values, others, strict=True)
    return [None if a is None or b is None else max(0.0, a - b) for a, b in pairs]


def _over(values: Sequence[float | None], counts: Sequence[float | None]) -> list[float | None]:
    """Return values for each of some counts; None where nothing was counted."""
    pairs = zip(values, counts, strict=True)
    return [value / count if value is not None and count else None for value, count in pairs]
