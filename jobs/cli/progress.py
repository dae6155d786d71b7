"""Shows a run's progress on standard error: a bar on a terminal, now and then a line in a log."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Protocol, TextIO

from tqdm import tqdm

from jobs.runs.watching.follow import Display
from jobs.runs.watching.snapshot import RunSnapshot

#: Between two lines of a log.
LINE_EVERY_S = 10.0


class Progress(Display, Protocol):
    """A display that ends."""

    def close(self) -> None: ...


#: tqdm's own guess counts rows, and rows that are still to come may be longer.
BAR_FORMAT = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"


class Bar:
    """A progress bar of rows, with tokens per second and the time left."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._bar = tqdm(
            unit="row", total=0, dynamic_ncols=True, desc="planning", file=file, bar_format=BAR_FORMAT
        )

    def show(self, snapshot: RunSnapshot, tokens_per_s: float) -> None:
        # What an earlier submit finished, or planning finds done, is not this one's speed.
        begins = self._bar.total != snapshot.rows or snapshot.awaits_plan or snapshot.rows_done < self._bar.n
        if snapshot.rows is not None and begins:
            self._bar.reset(snapshot.rows)
            self._bar.initial = self._bar.n = snapshot.rows_done
        self._bar.set_description_str(snapshot.state, refresh=False)
        self._bar.set_postfix_str(_speed(snapshot, tokens_per_s), refresh=False)
        self._bar.update(max(0, snapshot.rows_done - self._bar.n))
        self._bar.refresh()

    def warn(self, text: str) -> None:
        tqdm.write(text, file=self._file)

    def close(self) -> None:
        self._bar.close()


class Lines:
    """A line when the run's state changes, and one every LINE_EVERY_S in between. clock: seconds."""

    def __init__(self, file: TextIO, clock: Callable[[], float]) -> None:
        self._file, self._clock = file, clock
        self._state, self._shown_at = "", 0.0

    def show(self, snapshot: RunSnapshot, tokens_per_s: float) -> None:
        now = self._clock()
        if snapshot.state == self._state and now - self._shown_at < LINE_EVERY_S:
            return
        self._state, self._shown_at = snapshot.state, now
        if snapshot.rows is None:
            self.warn(snapshot.state)
        else:
            rows = f"{snapshot.state}: {snapshot.rows_done} of {snapshot.rows} rows"
            self.warn(f"{rows}, {_speed(snapshot, tokens_per_s)}")

    def warn(self, text: str) -> None:
        print(text, file=self._file, flush=True)

    def close(self) -> None:
        """A line needs no end."""


def progress(clock: Callable[[], float]) -> Progress:
    """Return the display that suits standard error as it is now. clock: seconds, any zero."""
    return Bar(sys.stderr) if _has_columns(sys.stderr) else Lines(sys.stderr, clock)


def _has_columns(file: TextIO) -> bool:
    """Whether a bar can be drawn: some consoles and CI runners give a terminal of no size."""
    try:
        return file.isatty() and os.get_terminal_size(file.fileno()).columns > 0
    except (OSError, ValueError):
        return False


def _speed(snapshot: RunSnapshot, tokens_per_s: float) -> str:
    speed = f"{tokens_per_s:.0f} tok/s"
    failed = len(snapshot.failures)
    left = time_left_text(snapshot)
    told = [speed, *([] if left is None else [f"{left} left"])]
    return ", ".join([*told, *([f"{failed} shards failed"] if failed else [])])


def time_left_text(snapshot: RunSnapshot) -> str | None:
    """Return in words how long a run will still take, or None while nothing tells."""
    if snapshot.left_s is None or snapshot.state != "running":
        return None
    return duration_text(snapshot.left_s)


def duration_text(seconds: float) -> str:
    """Return a time in its two largest units."""
    whole = round(seconds)
    days, hours, minutes = whole // 86400, whole // 3600, whole // 60
    if days:
        return f"{days} d {hours % 24} h"
    if hours:
        return f"{hours} h {minutes % 60} min"
    return f"{minutes} min {whole % 60} s" if minutes else f"{whole} s"
