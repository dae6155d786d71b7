"""Prints a run's state, its progress while a user waits, tables, and errors."""

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from typing import TextIO

import click
import redis

from jobs.common.display import MAX_TEXT_CHARS, plural, safe_name, utc_text
from jobs.common.redis_info import is_full
from jobs.common.rq_jobs import last_value
from jobs.doctor.redis_server import NOT_SERVED, not_served, troubles
from jobs.errors import JobsError
from jobs.runs.statistics.run_statistics import outcome_text
from jobs.runs.watching.failures import failure_text
from jobs.runs.watching.follow import REFUSED_BUT_FINISHED, End, Watch, follow
from jobs.runs.watching.progress_bar import Bar, speed_text
from jobs.runs.watching.reading import read_planned
from jobs.runs.watching.snapshot import REFUSED, RunSnapshot, left_text, needs, obstacles, verdict

#: Printed if there is no worker at all.
NO_WORKER_TEXT = (
    "no worker: start one with `rq worker --worker-class worker.BatchWorker -S json QUEUE`"
)


@contextmanager
def errors_printed() -> Iterator[None]:
    """Turn an error that a user can act on into a ClickException: one line, safe for a terminal, and exit status 1."""
    cause: Exception
    try:
        yield
        return
    except JobsError as error:
        text = f"{type(error).__name__}: {error}"
        cause = error
    except NOT_SERVED as error:
        finding = not_served(click.get_current_context().find_root().params["url"], error)
        text = f"{finding.text}: {finding.mend}"
        cause = error
    except redis.exceptions.RedisError as error:
        text = f"Redis refused ({type(error).__name__}): {error}"
        if is_full(error):
            text = (
                "Redis is full, and takes no writes: give it more memory (redis-cli CONFIG SET "
                "maxmemory), then see what fills it (tokenmill info, tokenmill flood QUEUE)"
            )
        cause = error
    raise click.ClickException(safe_name(text, MAX_TEXT_CHARS)) from cause


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[str] = ()) -> str:
    """Return a table as lines of text. numbers: the heads of the columns that are aligned to the right."""
    columns = []
    for column in zip(heads, *rows, strict=True):
        head = column[0]
        width = max(map(len, column))
        align = str.rjust if head in numbers else str.ljust
        columns.append([align(cell, width) for cell in column])
    lines = []
    for cells in zip(*columns, strict=True):
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def print_troubles(connection: redis.Redis) -> None:
    """Print what is wrong with Redis, if it takes no jobs or may lose them."""
    for trouble in troubles(connection):
        click.secho(f"Redis: {safe_name(trouble, MAX_TEXT_CHARS)}", fg="red", err=True)


def rate(value: float | None) -> str:
    """Return a rate as a table shows it; "-" if there is none."""
    if value is None:
        return "-"
    if value >= 10:
        return f"{value:.0f}"
    return f"{value:.1f}"


#: Seconds between two lines of progress, if the state stays the same.
LINE_EVERY_S = 10.0


class Lines:
    """Prints a line when a run's state changes, and every LINE_EVERY_S while it stays the same.

    clock: returns the present time in seconds, from any origin.
    """

    def __init__(self, file: TextIO, clock: Callable[[], float]) -> None:
        self._file = file
        self._clock = clock
        self._state = ""
        self._printed_at = 0.0  # by `clock`

    def show(self, snapshot: RunSnapshot) -> None:
        """Print a run's progress, unless it was printed shortly before."""
        now = self._clock()
        if snapshot.state == self._state and now - self._printed_at < LINE_EVERY_S:
            return
        self._state = snapshot.state
        self._printed_at = now
        line = snapshot.state
        if snapshot.rows is not None:
            rows = plural("row", snapshot.rows)
            line += f": {snapshot.rows_done} of {snapshot.rows} {rows}"
            speed = speed_text(snapshot)
            if speed:
                line += f", {speed}"
        self._print(line)

    def warn(self, text: str) -> None:
        """Print a warning between the lines of progress."""
        self._print(text)

    def _print(self, line: str) -> None:
        """Print a line."""
        print(line, file=self._file, flush=True)

    def close(self) -> None:
        """Do nothing. Only a Bar, which may be used in place of Lines, needs to be closed."""


def _can_draw_bar(file: TextIO) -> bool:
    """Whether a progress bar can be drawn on a file: whether it is a terminal of known width."""
    with suppress(OSError, ValueError):
        return file.isatty() and os.get_terminal_size(file.fileno()).columns > 0
    return False


#: The most failed shards whose reasons are printed.
MAX_SHOWN = 5


def print_failures(connection: redis.Redis, snapshot: RunSnapshot) -> None:
    """Print the errors of a run's first failed shards. Prints nothing for a cancelled run."""
    if snapshot.cancelled:
        return
    for job_id in snapshot.failed_jobs[:MAX_SHOWN]:
        click.echo(f"{job_id}: {failure_text(connection, job_id)}", err=True)
    num_more = len(snapshot.failed_jobs) - MAX_SHOWN
    if num_more > 0:
        click.echo(f"and {num_more} more failed {plural('shard', num_more)}", err=True)


def status_text(snapshot: RunSnapshot, num_gone_parts: int = 0) -> str:
    """Return a run's status in lines. num_gone_parts: how many parts of a finished run are gone."""
    state = "incomplete" if num_gone_parts else snapshot.state
    lines = [f"run {snapshot.run}: {state}", f"output   {snapshot.output}"]
    if snapshot.rows is not None:
        outcome = outcome_text(snapshot.errors, snapshot.failed_checks, snapshot.cut)
        lines.append(f"rows     {snapshot.rows_done} of {snapshot.rows}, {outcome}")
        if snapshot.rows_reused:
            rows = plural("row", snapshot.rows_reused)
            lines.append(f"reused   {snapshot.rows_reused} {rows} of earlier runs")
        if snapshot.reuse_differs:
            lines.append(f"but      few answers were taken from {snapshot.reuse_differs}")
        if snapshot.rows_escalated:
            rows = plural("row", snapshot.rows_escalated)
            lines.append(f"again    {snapshot.rows_escalated} {rows}, by the second model")
        if snapshot.errors or snapshot.cut:
            option = " --cut" if snapshot.cut else ""
            lines.append(f"why      `tokenmill errors {snapshot.run}{option}` lists them by reason")
        done_and_started = (
            f"{snapshot.shards_done} of {snapshot.shards} done, {snapshot.shards_started} started"
        )
        lines.append(f"shards   {done_and_started}, {_other_shards_text(snapshot)}")
        lines.append(f"tokens   {snapshot.tokens} generated")
        time_left = left_text(snapshot)
        if time_left:
            lines.append(f"left     {time_left}")
        if snapshot.deadline is not None and not snapshot.finished:
            lines.append(f"deadline {deadline_text(snapshot)}")
    lines += verdict(snapshot)
    lines += gone_text(num_gone_parts, snapshot.output)
    return "\n".join(lines)


def deadline_text(snapshot: RunSnapshot) -> str:
    """Say when a run's deadline is, and whether it will be met. The run must have a deadline."""
    assert snapshot.deadline is not None
    prospects = {
        True: "it will be met",
        False: "it will NOT be met: rows that are not begun by then get an error",
        None: "whether it will be met is not known yet",
    }
    return f"{utc_text(snapshot.deadline)}, {prospects[snapshot.deadline_holds]}"


def gone_text(num_gone_parts: int, folder: str) -> list[str]:
    """Return a list with the line that says how many parts are gone; an empty list if none is gone."""
    if not num_gone_parts:
        return []
    parts = "part is" if num_gone_parts == 1 else "parts are"
    remedy = f"to compute what is missing, submit into another folder with --reuse {folder}"
    return [f"but      {num_gone_parts} {parts} gone: {remedy}"]


def _other_shards_text(snapshot: RunSnapshot) -> str:
    """Say how many shards are queued, failed or without a job.

    If the run has stopped, say only how many shards are left.
    """
    num_failed = len(snapshot.failed_jobs)
    if snapshot.cancelled or (snapshot.plan_failed and snapshot.is_idle):
        # No worker will run any of these shards.
        num_left = snapshot.queued + num_failed + snapshot.gone
        return f"{num_left} left for another submit"
    gone = f", {snapshot.gone} whose jobs are gone" if snapshot.gone else ""
    return f"{snapshot.queued} queued, {num_failed} failed{gone}"


#: Seconds that `submit` waits for planning to accept the run.
PLAN_WAIT_S = 10.0
#: Seconds between two checks of the planning's state.
PLAN_POLL_S = 0.1


def await_plan(connection: redis.Redis, run: str) -> None:
    """Print a run's id when planning has accepted the run, or has not ended after PLAN_WAIT_S.

    Exits with 1 if planning refuses the run, and with 130 on Ctrl-C.
    """
    until = time.monotonic() + PLAN_WAIT_S
    watch = Watch(lambda: read_planned(connection, run))
    with _ctrl_c_leaves_run_going(run, watch):
        snapshot = watch()
        while snapshot.is_planning and time.monotonic() < until:
            if needs(snapshot):
                break  # no worker will plan the run soon
            time.sleep(PLAN_POLL_S)
            snapshot = watch()
    if snapshot.plan_status in REFUSED:
        click.echo(f"planning: {snapshot.plan_error}", err=True)
        problem = REFUSED_BUT_FINISHED if snapshot.finished else End.PLAN_FAILED.value
        raise click.ClickException(problem)
    click.echo(run)
    for line in [*verdict(snapshot), *obstacles(connection, snapshot)]:
        click.echo(line, err=True)
    if snapshot.finished and not snapshot.is_planning:
        _print_if_already_finished(connection, snapshot)


def _print_if_already_finished(connection: redis.Redis, snapshot: RunSnapshot) -> None:
    """Print that the run was finished already, if this submit found nothing to do."""
    if snapshot.plan_job and last_value(connection, snapshot.plan_job).get("already_finished"):
        rows_are = "row is" if snapshot.rows == 1 else "rows are"
        text = f"the run is already finished: its {snapshot.rows} {rows_are} in {snapshot.output}"
        click.echo(text, err=True)


@contextmanager
def _ctrl_c_leaves_run_going(run: str, watch: Watch) -> Iterator[None]:
    """On Ctrl-C, say that the run goes on, or what it waits for, and exit with 130."""
    try:
        yield
    except KeyboardInterrupt:
        state = "goes on"
        if watch.waits_for is not None:
            state = f"was not cancelled, and waits ({watch.waits_for})"
        commands = (
            f"`tokenmill status {run}` shows it, the same submit with --wait follows it, "
            f"`tokenmill cancel {run}` ends it"
        )
        click.echo(f"the run {state}: {commands}", err=True)
        sys.exit(130)


def wait_for_end(connection: redis.Redis, run: str) -> None:
    """Print a run's id, its progress and how it ended. Exits with 1 if the run failed, and with 130 on Ctrl-C."""
    click.echo(run)
    display = Bar(sys.stderr) if _can_draw_bar(sys.stderr) else Lines(sys.stderr, time.monotonic)
    watch = Watch(lambda: read_planned(connection, run))
    with _ctrl_c_leaves_run_going(run, watch), closing(display):
        followed = follow(watch, time.sleep, display.show, display.warn)
    click.echo(status_text(followed.snapshot))
    if followed.end is End.FINISHED:
        _print_if_already_finished(connection, followed.snapshot)
    else:
        print_failures(connection, followed.snapshot)
    if followed.problem is not None:
        raise click.ClickException(followed.problem)
