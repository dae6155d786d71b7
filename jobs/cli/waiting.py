"""Waits on the terminal for a run: until its planning has accepted it, or until it ends."""

import sys
import time

import click
import redis

from jobs.cli.status_text import progress, status_text, tell_failures
from jobs.common.rq_jobs import last_value
from jobs.runs.watching.follow import REFUSED_AS_BEFORE, End, follow
from jobs.runs.watching.reading import read_planned
from jobs.runs.watching.snapshot import REFUSED, RunSnapshot
from jobs.runs.watching.words import needs, obstacles, verdict

#: How long `submit` waits for its planning to accept the run, and between two looks.
PLAN_WAIT_S, PLAN_POLL_S = 10.0, 0.1


def await_plan(connection: redis.Redis, run: str) -> None:
    """Print a run's id once its planning accepts it, or takes long. Exits with 1 if refused, 130 on Ctrl-C."""
    until = time.monotonic() + PLAN_WAIT_S
    try:
        while (snapshot := read_planned(connection, run)).is_planning and time.monotonic() < until:
            if needs(snapshot):
                break  # nobody is soon to plan it
            time.sleep(PLAN_POLL_S)
    except KeyboardInterrupt:
        click.echo(_goes_on(run), err=True)
        sys.exit(130)
    if snapshot.plan_status in REFUSED:
        tell_failures(connection, snapshot)
        raise click.ClickException(REFUSED_AS_BEFORE if snapshot.finished else End.PLAN_FAILED.value)
    click.echo(run)
    for line in [*verdict(snapshot), *obstacles(connection, snapshot)]:
        click.echo(line, err=True)
    if snapshot.finished and not snapshot.is_planning:
        _tell_if_already_finished(connection, snapshot)


def _tell_if_already_finished(connection: redis.Redis, snapshot: RunSnapshot) -> None:
    if snapshot.plan_job and last_value(connection, snapshot.plan_job).get("already_finished"):
        text = f"the run is already finished: its {snapshot.rows} rows are in {snapshot.output}"
        click.echo(text, err=True)


def _goes_on(run: str) -> str:
    return (
        f"the run goes on: `tokenmill status {run}` shows it, the same submit with --wait follows it, "
        f"`tokenmill cancel {run}` ends it"
    )


def wait_for_end(connection: redis.Redis, run: str) -> None:
    display = progress(time.monotonic)
    try:
        followed = follow(lambda: read_planned(connection, run), display, time.monotonic, time.sleep)
    except KeyboardInterrupt:
        display.close()
        click.echo(_goes_on(run), err=True)
        sys.exit(130)
    finally:
        display.close()
    click.echo(status_text(followed.snapshot))
    if followed.end is End.FINISHED:
        _tell_if_already_finished(connection, followed.snapshot)
    else:
        tell_failures(connection, followed.snapshot)
    if followed.problem is not None:
        raise click.ClickException(followed.problem)
