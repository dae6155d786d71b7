"""Commands that read a run's folder: `tokenmill errors`, `tail`, `report` and `verify`."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click
import redis

from jobs import client
from jobs.cli.status_text import await_plan, errors_printed, table, wait_for_end
from jobs.cli.trial_commands import try_job
from jobs.cli.watch_commands import json_option
from jobs.common.display import MAX_TEXT_CHARS, plural, safe_name, to_json
from jobs.errors import InputNotFound, InvalidJob, RunError, RunNotHere, UnknownRun
from jobs.runs.control import DEFAULT_QUEUE, retry_run
from jobs.runs.output import named_run
from jobs.runs.plans.names import MANIFEST, PLAN, REPORT
from jobs.runs.plans.paths import is_stored
from jobs.runs.redis_state.state import RunState, recorded_reasons
from jobs.runs.statistics.report import Examples, report_html
from jobs.runs.statistics.run_statistics import CUT, Reasons, outcome_text
from jobs.runs.watching.reading import read_planned
from jobs.runs.watching.snapshot import ENDED_STATES

if TYPE_CHECKING:
    from jobs.parquet.outputs.read_back import FailedRow, FolderReader

#: The most reasons that `errors` lists.
MAX_REASONS = 100
#: Printed if a run has no row with an error.
NO_FAILED_ROW = "no row has an error"
#: Seconds between two searches of `tail --follow` for new parts.
FOLLOW_EVERY_S = 1.0


@click.command()
@click.argument("run")
@click.option(
    "--limit",
    type=click.IntRange(0),
    default=20,
    show_default=True,
    help="The most rows that are listed.",
)
@click.option(
    "--retry",
    metavar="NEW",
    help="Submit the run again into NEW. Only rows with an error are asked.",
)
@click.option(
    "--cut",
    is_flag=True,
    help="Include rows whose answer ended with `length`; --retry asks them again with --max-tokens.",
)
@click.option(
    "--max-tokens", type=click.IntRange(1), help="With --cut: a larger limit than the run had."
)
@click.option(
    "--export",
    metavar="FILE",
    help="Write the rows into FILE (.parquet, .csv or .jsonl), with the input's columns, the reason and the line.",
)
@click.option(
    "--wait", is_flag=True, help="With --retry: show progress until the new run has ended."
)
@json_option
@click.pass_obj
def errors(
    connection: redis.Redis,
    /,
    run: str,
    limit: int,
    retry: str | None,
    cut: bool,
    max_tokens: int | None,
    export: str | None,
    wait: bool,
    as_json: bool,
) -> None:
    """List a run's rows that have an error, by reason. With --cut, list rows with a cut answer too.

    RUN is the run's id or output folder. Rows are counted from 0, over the whole input and within their file. The
    errors are read from the run's parts if its folder is on this machine, or in a store whose keys are in the
    environment. Otherwise the reasons that Redis keeps are shown.
    """
    _check_error_options(cut, retry, max_tokens, export, wait)
    client_run = client.run(run, connection=connection)
    if export is not None:
        _export_errors(client_run, export, cut)
    elif retry is not None:
        reader = reader_of(client_run)
        if not _has_rows_to_retry(reader, cut):
            click.echo(NO_FAILED_ROW, err=True)
            return
        new_run = retry_run(connection, reader.plan, retry, max_tokens)
        if wait:
            wait_for_end(connection, new_run)
        else:
            await_plan(connection, new_run)
    else:
        _list_errors(connection, client_run, limit, cut, as_json)


def _check_error_options(
    cut: bool, retry: str | None, max_tokens: int | None, export: str | None, wait: bool
) -> None:
    """Raise UsageError if options of `errors` do not go together."""
    if wait and retry is None:
        raise click.UsageError("--wait is for --retry: without --retry there is no run to await")
    retries_cut_rows = cut and retry is not None
    if retries_cut_rows and max_tokens is None:
        raise click.UsageError(
            "--retry with --cut needs --max-tokens: the old limit would cut the rows again"
        )
    if max_tokens is not None and not retries_cut_rows:
        raise click.UsageError(
            "--max-tokens is for --retry with --cut: without --cut only rows with an error are asked"
        )
    if export is not None and retry is not None:
        raise click.UsageError("--export and --retry each do something with the rows: give one")


def _has_rows_to_retry(reader: FolderReader, cut: bool) -> bool:
    """Whether a new run would ask any row: one with an error, or one whose part is missing.

    cut: whether rows with a cut answer would be asked too.
    """
    shards = reader.shards()
    if len(shards) < len(reader.plan.shards):
        return True
    for shard in shards:
        for _failed_row in reader.failed_rows(shard, cut):
            return True
    return False


def _export_errors(client_run: client.Run, file: str, cut: bool) -> None:
    """Write the rows of a run that have an error into a file. cut: whether to write rows with a cut answer too."""
    reader = reader_of(client_run)
    from jobs.parquet.outputs.failed_file import export_failed  # needs pyarrow, as the reader does

    num_rows = export_failed(reader, file, cut=cut)
    written = f"{num_rows} {plural('row', num_rows)} in {file}"
    click.echo(written if num_rows else NO_FAILED_ROW)


def _list_errors(
    connection: redis.Redis, client_run: client.Run, limit: int, cut: bool, as_json: bool
) -> None:
    """Print the rows of a run that have an error, or only the reasons that Redis keeps. Arguments: see `errors`."""
    snapshot = None
    with suppress(UnknownRun):
        snapshot = client_run.status()
    if snapshot is not None:
        was_planned = snapshot.shards is not None
        if snapshot.plan_error is not None and not was_planned:
            raise click.ClickException(
                f"run {client_run.id} has no rows: its planning failed: {snapshot.plan_error}"
            )

    format_errors = _errors_json if as_json else _errors_text
    try:
        reader = reader_of(client_run)
    except RunNotHere as error:
        reasons = recorded_reasons(connection, client_run.id)
        failed_checks = 0
        num_cut = 0
        if snapshot is not None:
            failed_checks = snapshot.failed_checks
            num_cut = snapshot.cut
        click.echo(format_errors(client_run.id, reasons, [], failed_checks, num_cut))
        note = f"{error}. These are the reasons that Redis keeps, the commonest of each part"
        click.echo(note, err=True)
        return
    reasons, rows = reader.errors(limit, cut)
    failed_checks, num_cut = reader.bad_answers()
    click.echo(format_errors(client_run.id, reasons, rows, failed_checks, num_cut))


@click.command()
@click.argument("run")
@click.option(
    "--lines",
    "-n",
    type=click.IntRange(0),
    default=10,
    show_default=True,
    help="How many of the last answers to show.",
)
@click.option(
    "--follow",
    "-f",
    is_flag=True,
    help="Go on with each part that is published, until the run ends.",
)
@click.option(
    "--prompts", is_flag=True, help="Also show the columns from which the prompts are made."
)
@json_option
@click.pass_obj
def tail(
    connection: redis.Redis, /, run: str, lines: int, follow: bool, prompts: bool, as_json: bool
) -> None:
    """Show the last answers of a run. A shard's answers are published together.

    RUN is the run's id or its output folder, on this machine or in a store whose keys are in the environment.
    """
    reader = reader_of(client.run(run, connection=connection))
    columns = list(reader.answer_columns)
    if prompts:
        columns = [*reader.prompt_columns, *columns]

    prefix = reader.plan.spec.output_prefix

    def show(rows: Iterator[dict[str, Any]]) -> None:
        """Print each row on a line of its own."""
        for row in rows:
            click.echo(to_json(row) if as_json else _row_text(row, prefix))

    def show_shard(shard: int) -> None:
        """Print all rows of a shard."""
        show(reader.answers(shard, columns))

    old_shards = set(reader.shards())
    show(_last_rows(reader, columns, lines))
    if follow:
        _follow(connection, reader, old_shards, show_shard)


def _follow(
    connection: redis.Redis,
    reader: FolderReader,
    old_shards: set[int],
    show_shard: Callable[[int], None],
) -> None:
    """Show each shard that is newly published, until the run ends or Ctrl-C is pressed.

    old_shards: the shards that were published before.
    """
    shown_shards = set(old_shards)
    try:
        while True:
            # `has_ended` is read before the shards are listed. So a shard that is published in between is still shown.
            has_ended = reader.has_ended or _has_ended(connection, reader.plan.run)
            for shard in reader.shards():
                if shard not in shown_shards:
                    show_shard(shard)
                    shown_shards.add(shard)
            if has_ended:
                return
            time.sleep(FOLLOW_EVERY_S)
    except KeyboardInterrupt:
        sys.exit(130)


def _has_ended(connection: redis.Redis, run: str) -> bool:
    """Whether a run has ended according to Redis. False if Redis does not know the run, or does not answer."""
    with suppress(UnknownRun, redis.exceptions.ConnectionError, redis.exceptions.TimeoutError):
        return read_planned(connection, run).state in ENDED_STATES
    return False


def _last_rows(reader: FolderReader, columns: list[str], num_rows: int) -> Iterator[dict[str, Any]]:
    """Yield the last `num_rows` rows of a run, from its newest parts."""
    rows: list[dict[str, Any]] = []
    written_at = reader.part_times()  # the time at which each shard's part was written
    newest_first = sorted(written_at, key=lambda shard: (written_at[shard], shard), reverse=True)
    for shard in newest_first:
        num_missing = num_rows - len(rows)
        if num_missing <= 0:
            break
        last_rows = deque(reader.answers(shard, columns), maxlen=num_missing)
        rows = [*last_rows, *rows]
    yield from rows


def reader_of(run: client.Run) -> FolderReader:
    """Return the reader of a run's folder. Raises RunNotHere if the folder cannot be read, or is another run's."""
    try:
        return run.reader("to read parts")
    except RunNotHere:
        raise
    except (ImportError, RunError) as error:
        raise RunNotHere(run.id, run.output, str(error)) from None


def _errors_json(
    run: str, reasons: Reasons, rows: list[FailedRow], failed_checks: int, num_cut: int
) -> str:
    """Return what `errors` prints for programs."""
    content = {
        "run": run,
        "errors": reasons.rows - reasons.rows_with(CUT),  # a cut answer is no error
        "failed_checks": failed_checks,
        "cut": num_cut,
        "reasons": reasons.to_objects(MAX_REASONS),
        "rows": [vars(row) for row in rows],
    }
    return json.dumps(content, ensure_ascii=False)


def _errors_text(
    run: str, reasons: Reasons, rows: list[FailedRow], failed_checks: int, num_cut: int
) -> str:
    """Return what `errors` prints for people: a table of the reasons, and a table of the rows if there are any."""
    num_errors = reasons.rows - reasons.rows_with(CUT)  # a cut answer is no error
    noun_with_blank = f"{plural('row', num_errors)} "
    outcome = outcome_text(num_errors, failed_checks, num_cut, noun=noun_with_blank)
    if not reasons.rows:
        if not failed_checks and not num_cut:
            outcome = NO_FAILED_ROW
        return f"run {run}: {outcome}"
    by_reason = []
    for reason in reasons.commonest(MAX_REASONS):
        examples = ", ".join(map(str, reason.examples))
        by_reason.append((str(reason.rows), examples, safe_name(reason.text, MAX_TEXT_CHARS)))
    heads = ("ROWS", "SUCH AS", "REASON")
    lines = [f"run {run}: {outcome}", table(heads, by_reason, numbers=["ROWS"])]
    if rows:
        by_row = []
        for row in rows:
            file = safe_name(row.file, MAX_TEXT_CHARS)
            by_row.append((str(row.row), file, str(row.file_row), safe_name(row.reason)))
        row_heads = ("ROW", "FILE", "ITS ROW", "REASON")
        lines += ["", table(row_heads, by_row, numbers=["ROW", "ITS ROW"])]
    return "\n".join(lines)


def _row_text(row: dict[str, Any], prefix: str) -> str:
    """Return a row as `tail` prints it. prefix: the text before the names of the columns that the run adds."""
    number = row["row"]
    error = row.get(f"{prefix}error")
    if error is not None:
        return f"row {number}: error: {safe_name(error, MAX_TEXT_CHARS)}"
    answer = dict(row)
    del answer["row"]
    answer.pop(f"{prefix}error", None)
    finish_reason = answer.pop(f"{prefix}finish_reason", None)
    text = to_json(answer)
    present_values = [value for value in answer.values() if value is not None]
    if len(present_values) == 1 and isinstance(present_values[0], str):
        text = present_values[0]  # an answer that is only a text is shown as it is
    ending = ""
    if finish_reason not in (None, "stop"):
        ending = f" [{finish_reason}]"
    return f"row {number}{ending}: {safe_name(text, MAX_TEXT_CHARS)}"


@click.command()
@click.argument("run")
@click.option("--price-per-hour", type=click.FloatRange(0), help="Price of a worker's machine.")
@click.option(
    "--out",
    type=click.Path(dir_okay=False),
    help="Write the page into this file, not in the run's folder.",
)
@click.option(
    "--prompts",
    is_flag=True,
    help="Also show the columns from which the examples' prompts are made.",
)
@click.pass_obj
def report(
    connection: redis.Redis,
    /,
    run: str,
    price_per_hour: float | None,
    out: str | None,
    prompts: bool,
) -> None:
    """Print where a finished run's report page is, or write the page again elsewhere.

    RUN is the run's id or its output folder, on this machine or in a store whose keys are in the environment.
    """
    needs_new_page = prompts or price_per_hour is not None
    if needs_new_page and out is None:
        raise click.UsageError(
            "--price-per-hour and --prompts make another page: name a file for it with --out"
        )
    client_run = client.run(run, connection=connection)
    folder = client_run.output
    # Without --out, the page is read only to see whether it is there. With --out, a new page is made from the manifest.
    file_name = REPORT if out is None else MANIFEST
    try:
        text = _file_text(client_run, file_name)
    except (OSError, InputNotFound) as error:
        raise InvalidJob(f"{error}: a run has a report when it is finished") from None
    if out is None:
        click.echo(os.path.join(folder, REPORT))
        return
    real_folder = Path(folder).resolve()
    if Path(out).resolve().is_relative_to(real_folder):
        raise InvalidJob(
            f"{out} lies in the folder of a finished run, which must not change: name a file elsewhere"
        )

    examples = _examples_of(client_run, has_prompts=prompts)
    try:
        page = report_html(json.loads(text), price_per_hour, examples)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidJob(
            f"{folder} has no manifest of this version of Tokenmill: {error}"
        ) from None
    Path(out).write_text(page, encoding="utf-8")
    click.echo(out)


def _examples_of(run: client.Run, *, has_prompts: bool) -> Examples | None:
    """Return rows of a run as examples, with their prompts if `has_prompts`.

    If the rows cannot be read, raises RunNotHere if `has_prompts` is true, and returns None otherwise.
    """
    try:
        return reader_of(run).examples(has_prompts=has_prompts)
    except RunNotHere:
        if has_prompts:
            raise
        return None


def _file_text(run: client.Run, name: str) -> str:
    """Return the text of a file in a run's folder. For a folder on a disk, this works without pyarrow."""
    if is_stored(run.output):
        return reader_of(run).text(name)
    return Path(run.output, name).read_text("utf-8")


#: Exit codes of `verify`: 1 if a row differs, 2 if nothing could be compared.
DIFFERENT = 1
NOT_VERIFIED = 2

#: The counts as `verify` prints them.
_COUNTS = """run {run}: {rows_checked:,} of {rows:,} {noun} checked
equal      {rows_equal:,}
different  {rows_different:,}
left out   {rows_not_compared:,}, which the run has an error for, and {rows_of_other_models:,} of other models"""


class _FinishedRun(NamedTuple):
    """What `verify` needs to know of a run. folder: its output, as workers name it. model: None if it is not known."""

    id: str
    queue: str
    folder: str
    model: str | None


def _finished_run(connection: redis.Redis, run: str) -> _FinishedRun:
    """Look up a finished run. Raises UnknownRun, or InvalidJob if the run cannot be verified.

    If Redis has forgotten the run, the run's folder is read, and the default queue is returned.
    """
    run_id, output = named_run(connection, run)
    try:
        snapshot = read_planned(connection, run_id)
    except UnknownRun:
        if output is None:
            raise
        _check_finished(run_id, output.state)
        plan = output.plan
        return _FinishedRun(run_id, DEFAULT_QUEUE, plan.spec.output, plan.model.fingerprint)
    _check_finished(snapshot.run, snapshot.state)
    # On a queue without workers, `verify` waits for a worker. So these errors are raised only if the queue has workers.
    if snapshot.workers and snapshot.awaited_model is not None:
        raise InvalidJob(
            f"run {snapshot.run} cannot be verified: no worker on queue {snapshot.queue!r} serves its model "
            f"{snapshot.awaited_model}: start one there"
        )
    if snapshot.workers and snapshot.awaited_adapters is not None:
        raise InvalidJob(
            f"run {snapshot.run} cannot be verified: no worker on queue {snapshot.queue!r} has the files of adapters "
            f"{snapshot.awaited_adapters}: put these files into the folder of its TOKENMILL_ADAPTERS"
        )
    facts = RunState(connection, snapshot.run).facts()
    return _FinishedRun(snapshot.run, snapshot.queue, facts["output"], facts.get("model"))


def _check_finished(run: str, state: str) -> None:
    """Raise InvalidJob if a run has not finished. An expired run has finished, without the rows after its deadline."""
    if state not in ("finished", "expired"):
        raise InvalidJob(f"run {run} cannot be verified: it is not finished, but {state}")


@click.command()
@click.argument("run")
@click.option(
    "--sample",
    default="1%",
    show_default=True,
    help="How many rows: a share such as 1%, or a number.",
)
@click.option(
    "--seed", type=int, default=0, show_default=True, help="Seed by which the rows are chosen."
)
@click.option(
    "--queue",
    help=f"Queue whose workers ask again; by default the run's queue, or {DEFAULT_QUEUE} if Redis forgot it.",
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print the result as JSON, with long values uncut."
)
@click.pass_obj
def verify(
    connection: redis.Redis, /, run: str, sample: str, seed: int, queue: str | None, as_json: bool
) -> None:
    """Compute rows of a finished run again, and compare.

    RUN is the run's id, or its output folder if Redis has forgotten the run. A worker of the run's queue and model asks
    a sample of the rows once more. The worker compares texts, reasons and counts of tokens with the run's parts, and
    writes nothing. Exits with 0 if all are equal, 1 if some differ, 2 if nothing could be compared. Differences may
    come from rounding, unless TOKENMILL_DETERMINISTIC=1 was set for both the run and verify.
    """
    try:
        with errors_printed():
            finished = _finished_run(connection, run)
            arguments = {
                "run": finished.id,
                "plan": os.path.join(finished.folder, PLAN),
                "sample": sample,
                "seed": seed,
            }
            queue_of_job = queue or finished.queue
            result = try_job(
                connection, queue_of_job, "jobs.verify_rows", arguments, finished.model
            )
    except click.ClickException as error:
        error.show()
        sys.exit(NOT_VERIFIED)

    if as_json:
        click.echo(json.dumps(result, ensure_ascii=False))
    else:
        click.echo(_comparison_text(result))
    if result["rows_different"]:
        sys.exit(DIFFERENT)
    if result["rows_not_compared"] and not result["rows_checked"]:
        sys.exit(NOT_VERIFIED)


def _comparison_text(result: dict[str, Any]) -> str:
    """Return what `verify` prints for people. result: what jobs.verify_rows has returned."""
    lines = [_COUNTS.format(**result, noun=plural("row", result["rows"]))]
    for difference in result["differences"]:
        lines.append(f"row {difference['row']}, column {difference['column']}")
        for name in ("recorded", "computed"):
            value = json.dumps(difference[name], ensure_ascii=False)
            lines.append(f"  {name}   {safe_name(value)}")
    return "\n".join(lines)
