"""The `tokenmill` command line: `submit`, `cancel` and `models`. Other files of this folder have the other commands."""

from typing import Any

import click
import redis

from jobs import client
from jobs.cli.folder_commands import errors, report, tail, verify
from jobs.cli.operator_commands import doctor, drain, flood, info, requeue_command, restore_check
from jobs.cli.run_options import (
    check_options,
    input_options,
    output_options,
    prompt_options,
    run_arguments,
)
from jobs.cli.server_commands import dashboard, keys, serve
from jobs.cli.status_text import await_plan, errors_printed, wait_for_end
from jobs.cli.trial_commands import MAX_ROWS_READ, dry_run_lines, preview, survey
from jobs.cli.watch_commands import runs, status, workers
from jobs.common.display import plural
from jobs.installed import describe_model, model_table
from jobs.runs.control import submit_run


class _Commands(click.Group):
    """The commands, whose errors are printed for people."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command that was named."""
        with errors_printed():
            return super().invoke(ctx)


@click.group(cls=_Commands)
@click.option(
    "--url",
    envvar="RQ_REDIS_URL",
    default="redis://localhost:6379",
    show_default=True,
    help="Redis to use; RQ_REDIS_URL sets it too.",
)
@click.version_option(package_name="tokenmill", prog_name="tokenmill")
@click.pass_context
def main(context: click.Context, url: str) -> None:
    """Score the rows of files with the workers of a Redis queue."""
    try:
        context.obj = redis.Redis.from_url(url)
    except ValueError:  # the error's text may hold the password
        raise click.UsageError(
            "--url or RQ_REDIS_URL is no Redis URL: expected redis://, rediss:// or unix://, "
            "with %-codes for /, @, : and # in a password"
        ) from None
    context.call_on_close(context.obj.close)


@main.command()
@click.option(
    "--wait", is_flag=True, help="Show progress until the run ends; exit with 1 if it fails."
)
@click.option(
    "--dry-run",
    is_flag=True,
    help="Submit nothing. Estimate the run's tokens and time: read all prompts, and answer some.",
)
@click.option(
    "--price-per-hour",
    type=float,
    help="Price of a worker's machine, from which the dry run estimates the run's cost.",
)
@input_options
@click.argument("output", metavar="OUT")
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
    price_per_hour: float | None,
    **options: Any,
) -> None:
    """Score the rows of files into a folder.

    Each FILE is a file, a folder or a glob of Parquet, CSV, JSONL or Arrow. Each row becomes a row in the folder
    OUT. Prints the run's id. Submitting the same again resumes the run.
    """
    if dry_run:
        survey_result = survey(connection, queue, options, max_rows=MAX_ROWS_READ)
        click.echo("\n".join(dry_run_lines(survey_result, price_per_hour)))
        return
    arguments = run_arguments(options)
    run = submit_run(connection, queue, check_run=client.check_here, **arguments)
    if wait:
        wait_for_end(connection, run)
    else:
        await_plan(connection, run)


@main.command()
@click.argument("run")
@click.pass_obj
def cancel(connection: redis.Redis, /, run: str) -> None:
    """Take a run's waiting jobs from the queue, and stop its running jobs.

    RUN is the run's id or output folder. Finished parts stay; submitting the run again resumes it.
    """
    client_run = client.run(run, connection=connection)
    cancelled = client_run.cancel()
    if client_run.status().finished and not cancelled.removed and not cancelled.stopped:
        click.echo(f"run {client_run.id} is finished: nothing was left to cancel")
    else:
        removed = f"{cancelled.removed} {plural('job', cancelled.removed)} removed"
        click.echo(f"cancelled: {removed}, {cancelled.stopped} told to stop")


@main.command()
@click.argument("model", metavar="[FOLDER]", required=False)
def models(model: str | None) -> None:
    """List the models that can be served and how, and the models that cannot.

    With a model's FOLDER or hub id, say how it is served and what memory it takes, without loading it.
    """
    click.echo(model_table() if model is None else describe_model(model))


_COMMANDS = (
    preview,
    status,
    runs,
    workers,
    errors,
    tail,
    verify,
    report,
    flood,
    info,
    drain,
    dashboard,
    doctor,
    requeue_command,
    restore_check,
    serve,
    keys,
)
for command in _COMMANDS:
    main.add_command(command)
