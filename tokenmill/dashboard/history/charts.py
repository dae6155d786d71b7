"""Reads the charts of a page, as an object for JSON."""

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

#: By the range's name in addresses: the index of the ring to read, and how many of its rows.
RANGES = {"15m": (0, 90), "1h": (0, 360), "24h": (1, 1440), "7d": (2, 1008)}

#: The most series that have a line of their own. All other series are summed in one more line.
MAX_LINES = 6

#: The most charts that are cached, and for how many seconds.
MAX_CACHED = 64
CACHED_S = 5.0

#: The most seconds that the writing of a row takes.
LATE_S = 2.0

Line = dict[str, Any]


class Charts:
    """Reads charts. Safe to call from many threads. clock: Unix seconds."""

    def __init__(self, connection: Redis, clock: Callable[[], float] = time.time) -> None:
        self._connection = connection
        self._rings = Rings(connection)
        self._clock = clock
        self._lock = threading.Lock()
        #: By page, name and range: when the charts expire, and the charts.
        self._cache: dict[tuple[str, str, str], tuple[float, dict[str, Any]]] = {}

    def read(self, of: str, name: str, range_: str) -> dict[str, Any] | None:
        """Return the charts of a page; None for an unknown kind of page or an unknown range. Raises RedisError.

        of: the kind of page: "overview", "queue", "worker" or "run". name: the name of the queue, worker or run.
        The result has `times` in Unix seconds, `width_s` (the seconds between two times), `charts` (lists of lines, by
        the chart's name), `marks` of workers, and `is_now` (whether the latest values are current).
        """
        if of not in _PAGES or range_ not in RANGES:
            return None
        cache_key = (of, name, range_)
        now = self._clock()
        with self._lock:
            expires_at, charts = self._cache.get(cache_key, (0.0, {}))
        if now < expires_at:
            return charts

        charts = self._read(of, name, range_, now)
        with self._lock:
            if len(self._cache) >= MAX_CACHED:
                self._cache.clear()
            self._cache[cache_key] = (now + CACHED_S, charts)
        return charts

    def _read(self, of: str, name: str, range_: str, now: float) -> dict[str, Any]:
        """Read the charts from Redis. Return what `read` returns."""
        ring, num_rows = RANGES[range_]
        width_s = RINGS[ring].width_s
        last = int((now - LATE_S) // width_s)
        if ring > 0:
            # A row of ten seconds is written when its time begins. A wider row is written after its time has ended.
            last -= 1
        row_numbers = range(last - num_rows + 1, last + 1)
        since = row_numbers[0] * width_s

        rows_by_kind = {}
        for kind in _PAGES[of]:
            names = list(self._rings.names(kind, since)) if of == "overview" else [name]
            rows_by_kind[kind] = self._rings.read(kind, ring, names, row_numbers[0], last)

        marks = read_marks(self._connection, since)
        is_now = True
        if of == "worker":
            marks = [mark for mark in marks if mark.worker == safe_name(name)]
            is_now = self._is_reporting(name)
        return {
            "is_now": is_now,
            "width_s": width_s,
            "times": [number * width_s for number in row_numbers],
            "charts": _CHARTS[of](rows_by_kind, row_numbers, name),
            "marks": [asdict(mark) for mark in marks],
        }

    def _is_reporting(self, name: str) -> bool:
        """Whether a worker of this name has reported its state lately."""
        if not is_unicode(name):
            return False
        for worker in read_workers(self._connection, [name]):
            if worker.sample is not None and not worker.sample.is_silent:
                return True
        return False


#: By the kind of page: the kinds of series that its charts need.
_PAGES: dict[str, tuple[Kind, ...]] = {
    "overview": (QUEUE, WORKER, FLEET),
    "queue": (QUEUE,),
    "worker": (WORKER,),
    "run": (RUN,),
}

#: Rows of series by the row's number, by the series' name, and by kind.
RowsByNumber = Mapping[int, Values]
RowsByName = Mapping[str, RowsByNumber]
RowsByKind = Mapping[Kind, RowsByName]


def _overview(rows_by_kind: RowsByKind, row_numbers: range, name: str) -> dict[str, list[Line]]:
    """Return the charts of the overview."""
    fleet_rows = rows_by_kind[FLEET].get(ALL, {})
    return {
        "waiting": _top_lines(QUEUE, "waiting", rows_by_kind[QUEUE], row_numbers, "other queues"),
        "workers": _top_lines(
            WORKER, "generated", rows_by_kind[WORKER], row_numbers, "other workers"
        ),
        "tokens": _lines(FLEET, FLEET.columns, fleet_rows, row_numbers),
    }


def _queue(rows_by_kind: RowsByKind, row_numbers: range, name: str) -> dict[str, list[Line]]:
    """Return the charts of a queue's page."""
    rows = rows_by_kind[QUEUE][name]
    values = {column: _column(QUEUE, column, rows, row_numbers) for column in QUEUE.columns}
    ended = values["ended"]
    failed = values["failed"]
    return {
        "waiting": [_line("waiting", values["waiting"])],
        "oldest": [_line("oldest", values["oldest_s"])],
        "ended": [_line("finished", _differences(ended, failed)), _line("failed", failed)],
        "latency": [
            _line("waited", _quotients(values["waited_s"], ended)),
            _line("ran", _quotients(values["ran_s"], ended)),
        ],
    }


def _worker(rows_by_kind: RowsByKind, row_numbers: range, name: str) -> dict[str, list[Line]]:
    """Return the charts of a worker's page."""
    return {"tokens": _lines(WORKER, WORKER.columns, rows_by_kind[WORKER][name], row_numbers)}


def _run(rows_by_kind: RowsByKind, row_numbers: range, name: str) -> dict[str, list[Line]]:
    """Return the charts of a run's page."""
    rows = rows_by_kind[RUN][name]
    return {
        "rows": _lines(RUN, ("rows", "errors"), rows, row_numbers),
        "tokens": _lines(RUN, ("tokens",), rows, row_numbers),
    }


_CHARTS: dict[str, Callable[[RowsByKind, range, str], dict[str, list[Line]]]] = {
    "overview": _overview,
    "queue": _queue,
    "worker": _worker,
    "run": _run,
}


def _lines(
    kind: Kind, columns: Iterable[str], rows: RowsByNumber, row_numbers: range
) -> list[Line]:
    """Return a line for each of these columns of a series."""
    return [_line(column, _column(kind, column, rows, row_numbers)) for column in columns]


def _column(
    kind: Kind, column: str, rows: RowsByNumber, row_numbers: Iterable[int]
) -> list[float | None]:
    """Return one column's values in the rows with these numbers; None where there is no row."""
    index = kind.columns.index(column)
    return [rows[number][index] if number in rows else None for number in row_numbers]


def _top_lines(
    kind: Kind, column: str, rows_by_name: RowsByName, row_numbers: range, others: str
) -> list[Line]:
    """Return a line for each of the MAX_LINES series with the highest peaks, and one line for the sum of the rest.

    others: what the rest is called, such as "other queues".
    """
    columns = {}
    peaks = {}
    for name, rows in rows_by_name.items():
        values = _column(kind, column, rows, row_numbers)
        columns[name] = values
        peaks[name] = max((value for value in values if value is not None), default=0.0)

    highest_first = sorted(columns, key=lambda name: (-peaks[name], name))
    top_names = sorted(highest_first[:MAX_LINES])
    lines = [_line(safe_name(name), columns[name]) for name in top_names]

    other_columns = [columns[name] for name in highest_first[MAX_LINES:]]
    if other_columns:
        sums = [_sum(values) for values in zip(*other_columns, strict=True)]
        lines.append(_line(f"{len(other_columns)} {others}", sums))
    return lines


def _line(name: str, values: Sequence[float | None]) -> Line:
    """Return a line as an object for JSON. Its values are rounded to six significant digits."""
    rounded = [None if value is None else float(f"{value:.6g}") for value in values]
    return {"name": name, "values": rounded}


def _sum(values: Iterable[float | None]) -> float | None:
    """Return the sum of the known values; None if there are none."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _differences(
    values: Sequence[float | None], subtracted: Sequence[float | None]
) -> list[float | None]:
    """Return each value minus its partner in `subtracted`, but at least 0; None where either is unknown."""
    differences: list[float | None] = []
    for value, partner in zip(values, subtracted, strict=True):
        if value is None or partner is None:
            differences.append(None)
        else:
            differences.append(max(0.0, value - partner))
    return differences


def _quotients(
    values: Sequence[float | None], counts: Sequence[float | None]
) -> list[float | None]:
    """Divide each value by its count. A quotient is None if the value is unknown, or the count is unknown or 0."""
    quotients: list[float | None] = []
    for value, count in zip(values, counts, strict=True):
        if value is None or not count:
            quotients.append(None)
        else:
            quotients.append(value / count)
    return quotients
