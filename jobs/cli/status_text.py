"""What is printed of a run's state, and why its jobs have failed."""

from __future__ import annotations

import click
import redis

from jobs.cli.progress import time_left_text
from jobs.runs.watching.snapshot import RunSnapshot, failure_text

#: Failed shards shown by name; the rest are counted.
MAX_SHOWN = 5


def tell_failures(connection: redis.Redis, snapshot: RunSnapshot) -> None:
    """Print the errors of a failed planning job and of the first failed shards.

    None of a cancelled run: its stopped shards are among RQ's failed ones.
    """
    if snapshot.cancelled:
        return
    if snapshot.plan_error is not None:
        click.echo(f"planning: {snapshot.plan_error}", err=True)
    for job_id in snapshot.failures[:MAX_SHOWN]:
        click.echo(f"{job_id}: {failure_text(connection, job_id)}", err=True)
    if len(snapshot.failures) > MAX_SHOWN:
        click.echo(f"and {len(snapshot.failures) - MAX_SHOWN} more failed shards", err=True)


def status_text(snapshot: RunSnapshot, num_gone: int = 0) -> str:
    """num_gone: parts of a finished run that are not in its folder any more."""
    if snapshot.rows is None:
        lines = [f"run {snapshot.run}: {snapshot.state}", f"output   {snapshot.output}"]
        return "\n".join([*lines, *_refused(snapshot), *awaits(snapshot)])
    return "\n".join(
        [
            f"run {snapshot.run}: {'incomplete' if num_gone else snapshot.state}",
            f"output   {snapshot.output}",
            f"rows     {snapshot.rows_done} of {snapshot.rows}, {snapshot.outcome}",
            *_why(snapshot),
            f"shards   {snapshot.done} of {snapshot.shards} done, {snapshot.started} started, "
            f"{_rest(snapshot)}",
            f"tokens   {snapshot.tokens} generated",
            *([] if (left := time_left_text(snapshot)) is None else [f"left     {left}"]),
            *_refused(snapshot),
            *awaits(snapshot),
            *gone_text(num_gone),
        ]
    )


def _refused(snapshot: RunSnapshot) -> list[str]:
    """Say why the last submit was refused, and that a run which had finished before is so still."""
    if snapshot.plan_error is None or snapshot.cancelled:
        return []
    if snapshot.finished:
        return [f"but      the last submit was refused: {snapshot.plan_error}; the run is finished as before"]
    return [f"because  its planning failed: {snapshot.plan_error}"]


def _why(snapshot: RunSnapshot) -> list[str]:
    """Say where the reasons of rows with an error stand, once there are some."""
    return [f"why      `tokenmill errors {snapshot.run}` lists them by reason"] if snapshot.errors else []


def gone_text(num_gone: int) -> list[str]:
    """Say what a folder lacks of a run that had finished."""
    return [f"but      {num_gone} parts are gone: submit it again, which computes them"] if num_gone else []


def awaits(snapshot: RunSnapshot) -> list[str]:
    """Say what a run needs to go on: another submit, or a worker that serves its model."""
    if snapshot.finished and not snapshot.is_planning:
        return [] if snapshot.too_many_errors is None else [f"but      {snapshot.too_many_errors}"]
    if snapshot.stopped is not None:
        return [f"because  {snapshot.stopped}"]
    if snapshot.awaited_model is None or snapshot.finished or snapshot.cancelled or not snapshot.workers:
        return []  # where there is no worker at all, that is said
    return [
        f"awaits   a worker on queue {snapshot.queue!r} that serves model {snapshot.awaited_model}; "
        f"none of the {snapshot.workers} there does"
    ]


def _rest(snapshot: RunSnapshot) -> str:
    if snapshot.cancelled or (snapshot.plan_failed and snapshot.is_idle):
        return f"{snapshot.queued + snapshot.failed + snapshot.gone} left for another submit"
    gone = f", {snapshot.gone} whose jobs are gone" if snapshot.gone else ""
    return f"{snapshot.queued} queued, {snapshot.failed} failed{gone}"
