"""The `tokenmill` command line: submit a Parquet run, look at it, cancel it."""

from __future__ import annotations

import importlib
import sys
import time
from typing import Any

import click
import redis

from ..client import check_here
from ..common.version import code_version
from ..errors import ForeignJobsPackage, UnknownRun
from ..runs.control import cancel_run, describe_again, submit_run
from ..runs.follow import End, Followed, follow
from ..runs.obstacles import listened_queues, obstacles
from ..runs.output import RunOutput, named_run, output_here
from ..runs.snapshot import REFUSED, RunSnapshot, failure_text, plan_result, read_planned
from ..stock_worker import model_table
from .check_options import check_arguments
from .dashboard_command import dashboard
from .errors_told import errors_told
from .progress import progress, time_left_text
from .queue_commands import info, requeue_command
from .report_command import report
from .rows_commands import errors, tail
from .run_options import check_options, input_options, output_options, prompt_options
from .submit_options import run_arguments
from .trial_commands import MAX_ROWS_READ, preview, tell_dry_run
from .verify_command import verify
from .watch_commands import json_option, run_json, runs, show_all_runs, watch_option, workers

#: Failed shards shown by name; the rest are counted.
MAX_SHOWN = 5

#: How long `submit` waits for its planning to accept the run, and between two looks.
PLAN_WAIT_S, PLAN_POLL_S = 10.0, 0.1


@click.group()
@click.option(
    "--url",
    envvar="RQ_REDIS_URL",
    default="redis://localhost:6379",
    show_default=True,
    help="Redis to use; RQ_REDIS_URL sets it too.",
)
@click.version_option(code_version(), prog_name="tokenmill")
@click.pass_context
def main(context: click.Context, url: str) -> None:
    """Score the rows of files with the workers of a Redis queue."""
    with errors_told():
        check_jobs_package()
    try:
        context.obj = redis.Redis.from_url(url)
    except ValueError:  # its text may hold the password
        raise click.UsageError(
            "--url or RQ_REDIS_URL is no Redis URL: expected redis://, rediss:// or unix://, "
            "with %-codes for /, @, : and # in a password"
        ) from None
    context.call_on_close(context.obj.close)


@main.command()
@click.argument("files", metavar="FILE...", nargs=-1, required=True)
@click.argument("output", metavar="OUT")
@click.option("--wait", is_flag=True, help="Show progress until the run ends; exit with 1 if it fails.")
@click.option("--queue", default="bulk", show_default=True, help="Whose workers do it.")
@click.option("--dry-run", is_flag=True, help="Say what the run would take, from all prompts and 64 answers.")
@click.option(
    "--dry-run-rows",
    type=click.IntRange(1),
    default=MAX_ROWS_READ,
    show_default=True,
    help="Of larger runs a dry run looks at a share of about so many rows.",
)
@click.option("--price-per-hour", type=float, help="What a worker's machine costs, for the dry run's sum.")
@input_options
@prompt_options
@check_options
@output_options
@click.pass_obj
def submit(
    connection: redis.Redis,
    /,
    wait: bool,
    queue: str,
    dry_run: bool,
    dry_run_rows: int,
    price_per_hour: float | None,
    **options: Any,
) -> None:
    """Score the rows of files into a folder.

    Every row of the FILEs (Parquet, CSV, JSONL or Arrow; files, folders or globs) gets one in the folder OUT.
    Prints the run's id. Submitting the same again resumes the run.
    """
    with errors_told():
        arguments = {**run_arguments(options), **check_arguments(options)}
        if dry_run:
            tell_dry_run(connection, queue, options, dry_run_rows, price_per_hour)
            return
        run = submit_run(connection, queue, check_run=check_here, **arguments)
        if wait:
            click.echo(run)
            _wait(connection, run)
        else:
            _await_plan(connection, run)


@main.command()
@click.argument("run", required=False)
@json_option
@watch_option
@click.pass_obj
def status(connection: redis.Redis, /, run: str | None, as_json: bool, watch: bool) -> None:
    """Print what is known of a run, or of all.

    Without RUN those that move, and the last ones that ended. RUN is its id or its output folder, which is
    enough where Redis lost it.
    """
    with errors_told():
        if run is None:
            show_all_runs(connection, as_json, watch)
            return
        if watch:
            raise click.UsageError("--watch is for all runs: the same submit with --wait follows one")
        if as_json:
            click.echo(run_json(connection, run))
            return
        run, output = named_run(connection, run)
        try:
            snapshot = read_planned(connection, run)
        except UnknownRun:
            if output is None:
                raise
            click.echo(_output_text(output))
            return
        output = output or output_here(snapshot.output, snapshot.run)
        click.echo(_status_text(snapshot, output.num_gone if output and snapshot.finished else 0))
        for obstacle in obstacles(connection, snapshot):
            click.echo(f"waits    {obstacle}")
        _tell_failures(connection, snapshot)


@main.command()
@click.argument("run")
@click.pass_obj
def cancel(connection: redis.Redis, /, run: str) -> None:
    """Take a run's jobs from the queue and stop it.

    RUN is its id or its output folder. Its jobs that run are stopped, its finished parts stay; submitting
    the run again resumes it.
    """
    with errors_told():
        run, output = named_run(connection, run)
        try:
            snapshot = read_planned(connection, run)
        except UnknownRun:
            if output is None or not describe_again(connection, output):
                raise
            snapshot = read_planned(connection, run)
        cancelled = cancel_run(connection, snapshot.run)
        if snapshot.state == "finished" and not cancelled.removed and not cancelled.stopped:
            click.echo(f"run {snapshot.run} is finished: nothing was left to cancel")
        else:
            click.echo(f"cancelled: {cancelled.removed} jobs removed, {cancelled.stopped} told to stop")


@main.command()
def models() -> None:
    """List which models are served, how, and which are not."""
    click.echo(model_table())


main.add_command(preview)
main.add_command(runs)
main.add_command(workers)
main.add_command(errors)
main.add_command(tail)
main.add_command(verify)
main.add_command(report)
main.add_command(info)
main.add_command(dashboard)
main.add_command(requeue_command)


def check_jobs_package() -> None:
    """Raise ForeignJobsPackage when `jobs`, which workers import by name, is another package here."""
    found = importlib.import_module("jobs")
    if not getattr(found, "__tokenmill__", False):
        raise ForeignJobsPackage(getattr(found, "__file__", None) or "a folder without __init__.py")


def _await_plan(connection: redis.Redis, run: str) -> None:
    """Print a submitted run's id, once its planning has accepted it, or takes longer than PLAN_WAIT_S.

    Exits with 1 where the planning refuses the run, with 130 on Ctrl-C, which leaves it going.
    """
    until = time.monotonic() + PLAN_WAIT_S
    try:
        while _is_planned_now(snapshot := read_planned(connection, run)) and time.monotonic() < until:
            time.sleep(PLAN_POLL_S)
    except KeyboardInterrupt:
        click.echo(_goes_on(run), err=True)
        sys.exit(130)
    if snapshot.plan_status in REFUSED:
        _tell_failures(connection, snapshot)
        raise click.ClickException("planning failed: repair what is named above, then submit again")
    click.echo(run)
    for line in [*_awaits(snapshot), *obstacles(connection, snapshot)]:
        click.echo(line, err=True)
    if snapshot.finished and not snapshot.is_planning:
        _tell_if_already_finished(connection, snapshot)


def _is_planned_now(snapshot: RunSnapshot) -> bool:
    """Whether a worker plans a run, or is soon to."""
    return snapshot.is_planning and snapshot.workers > 0 and snapshot.awaited_model is None


def _tell_if_already_finished(connection: redis.Redis, snapshot: RunSnapshot) -> None:
    planned = plan_result(connection, snapshot.plan_job) if snapshot.plan_job else None
    if planned is not None and planned.get("already_finished"):
        text = f"the run is already finished: its {snapshot.rows} rows are in {snapshot.output}"
        click.echo(text, err=True)


def _goes_on(run: str) -> str:
    return (
        f"the run goes on: `tokenmill status {run}` shows it, the same submit with --wait follows it, "
        f"`tokenmill cancel {run}` ends it"
    )


def _wait(connection: redis.Redis, run: str) -> None:
    """Show progress until the run ends. Exits with 1 when it failed, with 130 on Ctrl-C."""
    display = progress(time.monotonic)
    try:
        followed = follow(
            lambda: read_planned(connection, run),
            display,
            time.monotonic,
            time.sleep,
            lambda: listened_queues(connection),
        )
    except KeyboardInterrupt:
        display.close()
        click.echo(_goes_on(run), err=True)
        sys.exit(130)
    finally:
        display.close()
    _tell_end(connection, followed)


def _tell_end(connection: redis.Redis, followed: Followed) -> None:
    snapshot = followed.snapshot
    click.echo(_status_text(snapshot))
    if followed.end is End.FINISHED:
        _tell_if_already_finished(connection, snapshot)
        if snapshot.too_many_errors is not None:
            raise click.ClickException(f"run {snapshot.run} is finished, but {snapshot.too_many_errors}")
        return
    _tell_failures(connection, snapshot)
    if followed.end is End.CANCELLED:
        if snapshot.stopped is not None:
            raise click.ClickException(f"run {snapshot.run} was stopped: {snapshot.stopped}")
        raise click.ClickException(f"run {snapshot.run} was cancelled: submit it again to resume it")
    if followed.end is End.FORGOTTEN:
        raise click.ClickException(f"{followed.end.value}; its parts stay: submit it again to resume it")
    if followed.end is End.STRANDED:
        raise click.ClickException(f"{followed.end.value}: submit it again, which also repairs its end")
    raise click.ClickException(f"{followed.end.value}: repair what is named above, then submit again")


def _tell_failures(connection: redis.Redis, snapshot: RunSnapshot) -> None:
    """Print the errors of a failed planning job and of the first failed shards.

    None of a cancelled run: its stopped shards are among RQ's failed ones.
    """
    if snapshot.cancelled:
        return
    if snapshot.plan_job is not None and snapshot.plan_status == "failed":
        click.echo(f"planning: {failure_text(connection, snapshot.plan_job)}", err=True)
    for job_id in snapshot.failures[:MAX_SHOWN]:
        click.echo(f"{job_id}: {failure_text(connection, job_id)}", err=True)
    if len(snapshot.failures) > MAX_SHOWN:
        click.echo(f"and {len(snapshot.failures) - MAX_SHOWN} more failed shards", err=True)


def _status_text(snapshot: RunSnapshot, num_gone: int = 0) -> str:
    """num_gone: parts of a finished run that are not in its folder any more."""
    if snapshot.rows is None:
        lines = [f"run {snapshot.run}: {snapshot.state}", f"output   {snapshot.output}", *_awaits(snapshot)]
        return "\n".join(lines)
    return "\n".join(
        [
            f"run {snapshot.run}: {'incomplete' if num_gone else snapshot.state}",
            f"output   {snapshot.output}",
            f"rows     {snapshot.rows_done} of {snapshot.rows}, {snapshot.errors} with an error",
            *_why(snapshot),
            f"shards   {snapshot.done} of {snapshot.shards} done, {snapshot.started} started, "
            f"{_rest(snapshot)}",
            f"tokens   {snapshot.tokens} generated",
            *([] if (left := time_left_text(snapshot)) is None else [f"left     {left}"]),
            *_awaits(snapshot),
            *_gone(num_gone),
        ]
    )


def _why(snapshot: RunSnapshot) -> list[str]:
    """Say where the reasons of rows with an error stand, once there are some."""
    return [f"why      `tokenmill errors {snapshot.run}` lists them by reason"] if snapshot.errors else []


def _gone(num_gone: int) -> list[str]:
    """Say what a folder lacks of a run that had finished."""
    return [f"but      {num_gone} parts are gone: submit it again, which computes them"] if num_gone else []


def _awaits(snapshot: RunSnapshot) -> list[str]:
    """Say what a run needs to go on: another submit, or a worker that serves its model."""
    if snapshot.state == "finished":
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
    if snapshot.cancelled or (snapshot.plan_status in REFUSED and snapshot.is_idle):
        return f"{snapshot.queued + snapshot.failed} left for another submit"
    return f"{snapshot.queued} queued, {snapshot.failed} failed"


def _output_state(output: RunOutput) -> str:
    if output.finished:
        return "incomplete" if output.num_gone else "finished"
    return "this Redis does not know it any more"


def _output_text(output: RunOutput) -> str:
    errors = "" if output.errors is None else f", {output.errors} with an error"
    return "\n".join(
        [
            f"run {output.run}: {_output_state(output)}",
            f"output   {output.folder}",
            f"rows     {output.rows}{errors}",
            f"shards   {output.parts} of {output.shards} done",
            *_gone(output.num_gone),
            *([] if output.finished else ["submit it again with the same arguments: that resumes it"]),
        ]
    )
