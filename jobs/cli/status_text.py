"""What is printed of a run: its state, its progress as a bar or lines, and tables."""

import shutil
from collections.abc import Callable, Sequence
from typing import TextIO

import click
import redis

from jobs.common.display import duration_text
from jobs.runs.watching.snapshot import RunSnapshot, failure_text


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[str] = ()) -> str:
    """Return lines of columns. numbers: heads of the columns that stand to the right."""
    lines = [list(heads), *map(list, rows)]
    widths = [max(len(line[place]) for line in lines) for place in range(len(heads))]

    def cell(place: int, text: str) -> str:
        width = widths[place]
        return text.rjust(width) if heads[place] in numbers else text.ljust(width)

    return "\n".join("  ".join(cell(place, text) for place, text in enumerate(line)).rstrip() for line in lines)


def rate(value: float | None) -> str:
    """Return what is done a second."""
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"


def ago(seconds: float | None) -> str:
    """Return a span of time in its largest unit, "12 s" to "30 d"; "-" for none."""
    if seconds is None:
        return "-"
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


#: Between two lines of a log.
LINE_EVERY_S = 10.0

#: Characters of a progress bar, and what takes away all that stands on a terminal's line.
BAR_CHARS, ERASE = 10, "\r\x1b[2K"


class Progress:
    """A run's state, rows, speed and time left: with a bar on one line of a terminal, or as lines of a log.

    A log gets one when the state changes, and one every LINE_EVERY_S in between. clock: seconds.
    """

    def __init__(self, file: TextIO, clock: Callable[[], float]) -> None:
        self._file, self._clock, self._is_terminal = file, clock, file.isatty()
        self._state, self._shown_at, self._line = "", 0.0, ""

    def show(self, snapshot: RunSnapshot) -> None:
        now = self._clock()
        if self._is_terminal:
            self._line = _progress_text(snapshot, BAR_CHARS)
            self._file.write(f"{ERASE}{self._line[: shutil.get_terminal_size().columns - 1]}")
            self._file.flush()
        elif snapshot.state != self._state or now - self._shown_at >= LINE_EVERY_S:
            self._state, self._shown_at = snapshot.state, now
            self.warn(_progress_text(snapshot))

    def warn(self, text: str) -> None:
        print(f"{ERASE}{text}" if self._is_terminal else text, file=self._file, flush=True)

    def close(self) -> None:
        """End the terminal's line."""
        if self._line:
            print(file=self._file)


def _progress_text(snapshot: RunSnapshot, bar_chars: int = 0) -> str:
    if snapshot.rows is None:
        return snapshot.state
    done = snapshot.rows_done / (snapshot.rows or 1)
    bar = f"{done:4.0%} |{'#' * int(bar_chars * done):{bar_chars}}| " if bar_chars else ""
    told = [f"{snapshot.state}: {bar}{snapshot.rows_done} of {snapshot.rows} rows"]
    told.append(f"{snapshot.tokens_per_s or 0:.0f} tok/s")
    told += [] if snapshot.left_s is None else [f"{duration_text(snapshot.left_s)} left"]
    return ", ".join([*told, *([f"{snapshot.failed} shards failed"] if snapshot.failed else [])])


#: Failed shards shown by name; the rest are counted.
MAX_SHOWN = 5


def tell_failures(connection: redis.Redis, snapshot: RunSnapshot) -> None:
    """Print why planning and the first failed shards failed; nothing of a cancelled run, whose shards were stopped."""
    if snapshot.cancelled:
        return
    if snapshot.plan_error is not None:
        click.echo(f"planning: {snapshot.plan_error}", err=True)
    for job_id in snapshot.failed_jobs[:MAX_SHOWN]:
        click.echo(f"{job_id}: {failure_text(connection, job_id)}", err=True)
    if len(snapshot.failed_jobs) > MAX_SHOWN:
        click.echo(f"and {len(snapshot.failed_jobs) - MAX_SHOWN} more failed shards", err=True)


def status_text(snapshot: RunSnapshot, num_gone: int = 0) -> str:
    """Return what is told of a run. num_gone: parts of a finished one that its folder lacks."""
    lines = [f"run {snapshot.run}: {'incomplete' if num_gone else snapshot.state}", f"output   {snapshot.output}"]
    if snapshot.rows is not None:
        lines += [
            f"rows     {snapshot.rows_done} of {snapshot.rows}, {snapshot.outcome}",
            *([f"reused   {snapshot.rows_reused} rows of earlier runs"] if snapshot.rows_reused else []),
            *([f"why      `tokenmill errors {snapshot.run}` lists them by reason"] if snapshot.errors else []),
            f"shards   {snapshot.shards_done} of {snapshot.shards} done, {snapshot.shards_started} started, "
            f"{_rest(snapshot)}",
            f"tokens   {snapshot.tokens} generated",
            *([] if snapshot.left_s is None else [f"left     {duration_text(snapshot.left_s)}"]),
        ]
    return "\n".join([*lines, *reasons(snapshot), *gone_text(num_gone, snapshot.output)])


def reasons(snapshot: RunSnapshot) -> list[str]:
    """Say why a run stands as it does: what its planning refused, who stopped it, too many errors."""
    is_over, told = snapshot.finished and not snapshot.is_planning, list[str]()
    if snapshot.plan_error is not None and not snapshot.cancelled:
        refused = f"but      the last submit was refused: {snapshot.plan_error}; the run is finished as before"
        told.append(refused if snapshot.finished else f"because  its planning failed: {snapshot.plan_error}")
    if is_over and snapshot.too_many_errors is not None:
        told.append(f"but      {snapshot.too_many_errors}")
    elif not is_over and snapshot.stopped is not None:
        told.append(f"because  {snapshot.stopped}")
    return told


def gone_text(num_gone: int, folder: str) -> list[str]:
    """Say what a folder lacks of a run that had finished."""
    told = f"but      {num_gone} parts are gone: submit into another folder with --reuse {folder}, which computes them"
    return [told] if num_gone else []


def _rest(snapshot: RunSnapshot) -> str:
    if snapshot.cancelled or (snapshot.plan_failed and snapshot.is_idle):
        return f"{snapshot.queued + snapshot.failed + snapshot.gone} left for another submit"
    gone = f", {snapshot.gone} whose jobs are gone" if snapshot.gone else ""
    return f"{snapshot.queued} queued, {snapshot.failed} failed{gone}"
