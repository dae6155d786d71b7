"""What a run's folder tells, where it can be read here: `tokenmill errors`, `tail`, `report`, and `verify`."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import redis

from jobs import client
from jobs.cli.status_text import await_plan, errors_told, table, wait_for_end
from jobs.cli.trial_commands import try_job
from jobs.cli.watch_commands import json_option
from jobs.common.display import MAX_TEXT_CHARS, safe_name, to_json
from jobs.errors import InputNotFound, InvalidJob, RunError, RunNotHere, UnknownRun
from jobs.runs.control import DEFAULT_QUEUE, retry_run
from jobs.runs.output import named_run
from jobs.runs.plans.names import MANIFEST, PLAN, REPORT
from jobs.runs.plans.paths import is_stored
from jobs.runs.redis_state.state import RunState, recorded_reasons
from jobs.runs.statistics.report import report_html
from jobs.runs.statistics.run_statistics import Reasons, outcome_text
from jobs.runs.watching.reading import read_planned

if TYPE_CHECKING:
    from jobs.parquet.outputs.read_back import FailedRow, FolderReader

MAX_REASONS = 100
FOLLOW_EVERY_S = 1.0


@click.command()
@click.argument("run")
@click.option(
    "--limit", type=click.IntRange(0), default=20, show_default=True, help="Rows that are listed."
)
@click.option(
    "--retry", metavar="NEW", help="Submit the run again into NEW; only these rows are asked."
)
@click.option(
    "--cut",
    is_flag=True,
    help="With --retry and --max-tokens: ask rows again too that ended with `length`.",
)
@click.option("--max-tokens", type=click.IntRange(1), help="With --cut: more than the run had.")
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
    wait: bool,
    as_json: bool,
) -> None:
    """List a run's rows that have an error, by reason.

    RUN is its id or its output folder. Rows are counted from 0, over the whole input and within their file.
    They are read from the parts where the folder is on this machine, or in a store whose keys are in the
    environment; else Redis' reasons are told.
    """
    if wait and retry is None:
        raise click.UsageError("--wait is for --retry: without it nothing is awaited")
    if cut and (retry is None or max_tokens is None):
        raise click.UsageError(
            "--cut is for --retry, and needs --max-tokens: as many as before would cut them again"
        )
    if max_tokens is not None and not cut:
        raise click.UsageError(
            "--max-tokens is for --cut: without it only rows with an error are asked"
        )
    found = client.run(run, connection=connection)
    if retry is not None:
        tell = wait_for_end if wait else await_plan
        tell(connection, retry_run(connection, reader_of(found).plan, retry, max_tokens))
        return
    snapshot = None
    with suppress(UnknownRun):
        snapshot = found.status()
    if snapshot is not None and snapshot.plan_error is not None and snapshot.shards is None:
        raise click.ClickException(
            f"run {found.id} has no rows: its planning failed: {snapshot.plan_error}"
        )
    note = ""
    rows: list[FailedRow] = []
    try:
        reader = reader_of(found)
        (reasons, rows), bad = reader.errors(limit), reader.bad_answers()
    except RunNotHere as error:
        reasons = recorded_reasons(connection, found.id)
        bad = (0, 0) if snapshot is None else (snapshot.failed_checks, snapshot.cut)
        note = f"{error}. These are the reasons that Redis keeps, the commonest of each part"
    write = _errors_json if as_json else _errors_text
    click.echo(write(found.id, reasons, rows, *bad))
    if note:
        click.echo(note, err=True)


@click.command()
@click.argument("run")
@click.option(
    "--lines", "-n", type=click.IntRange(0), default=10, show_default=True, help="Answers at first."
)
@click.option(
    "--follow",
    "-f",
    is_flag=True,
    help="Go on with each part that is published, until the run ends.",
)
@click.option("--prompts", is_flag=True, help="Show the columns too that the prompts are made of.")
@json_option
@click.pass_obj
def tail(
    connection: redis.Redis, /, run: str, lines: int, follow: bool, prompts: bool, as_json: bool
) -> None:
    """Show the answers of a run that were published last, which come by the shard.

    RUN is its id or its output folder, on this machine or in a store whose keys are in the environment.
    """
    reader = reader_of(client.run(run, connection=connection))
    columns = [*(reader.prompt_columns if prompts else ()), *reader.answer_columns]

    def show(rows: Iterator[dict[str, Any]]) -> None:
        for row in rows:
            click.echo(to_json(row) if as_json else _row_text(row, reader.plan.spec.output_prefix))

    told = set(reader.shards())
    show(_last(reader, columns, lines))
    if follow:
        _follow(connection, reader, told, lambda shard: show(reader.answers(shard, columns)))


def _follow(
    connection: redis.Redis, reader: FolderReader, told: set[int], show: Callable[[int], None]
) -> None:
    try:
        while True:
            is_over = reader.has_ended or _has_ended(connection, reader.plan.run)
            for shard in (each for each in reader.shards() if each not in told):
                show(shard)
                told.add(shard)
            if is_over:
                return
            time.sleep(FOLLOW_EVERY_S)
    except KeyboardInterrupt:
        sys.exit(130)


def _has_ended(connection: redis.Redis, run: str) -> bool:
    with suppress(UnknownRun, redis.exceptions.ConnectionError, redis.exceptions.TimeoutError):
        return read_planned(connection, run).state in ("finished", "failed", "cancelled", "stopped")
    return False


def _last(reader: FolderReader, columns: list[str], most: int) -> Iterator[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    written = reader.parts()
    for shard in sorted(written, key=lambda shard: (-written[shard], -shard)):
        if len(found) >= most:
            break
        found = [*deque(reader.answers(shard, columns), maxlen=most - len(found)), *found]
    yield from found


def reader_of(found: client.Run) -> FolderReader:
    """Return what reads a run's folder. Raises RunNotHere, also where a store or another run has it."""
    try:
        return found.reader("to read parts")
    except RunNotHere:
        raise
    except (ImportError, RunError) as error:
        raise RunNotHere(found.id, f"nothing can be read ({error})", found.output) from None


def _errors_json(
    run: str, reasons: Reasons, rows: list[FailedRow], failed_checks: int, cut: int
) -> str:
    content = {
        "run": run,
        "errors": reasons.rows,
        "failed_checks": failed_checks,
        "cut": cut,
        "reasons": reasons.to_objects(MAX_REASONS),
        "rows": [vars(each) for each in rows],
    }
    return json.dumps(content, ensure_ascii=False)


def _errors_text(
    run: str, reasons: Reasons, rows: list[FailedRow], failed_checks: int, cut: int
) -> str:
    outcome = outcome_text(reasons.rows, failed_checks, cut, rows="rows ")
    if not reasons.rows:
        return f"run {run}: {outcome if failed_checks or cut else 'no row has an error'}"
    found = [
        (str(each.rows), ", ".join(map(str, each.examples)), safe_name(each.text, MAX_TEXT_CHARS))
        for each in reasons.commonest(MAX_REASONS)
    ]
    lines = [f"run {run}: {outcome}", table(("ROWS", "SUCH AS", "REASON"), found, ("ROWS",))]
    if rows:
        listed = [
            (
                str(each.row),
                safe_name(each.file, MAX_TEXT_CHARS),
                str(each.file_row),
                safe_name(each.reason),
            )
            for each in rows
        ]
        heads = ("ROW", "FILE", "ITS ROW", "REASON")
        lines += ["", table(heads, listed, ("ROW", "ITS ROW"))]
    return "\n".join(lines)


def _row_text(row: dict[str, Any], prefix: str) -> str:
    number, error = row["row"], row.get(f"{prefix}error")
    if error is not None:
        return f"row {number}: error: {safe_name(error, MAX_TEXT_CHARS)}"
    values = {name: value for name, value in row.items() if name not in ("row", f"{prefix}error")}
    reason = values.pop(f"{prefix}finish_reason", None)
    only = [value for value in values.values() if value is not None]
    text = only[0] if len(only) == 1 and isinstance(only[0], str) else to_json(values)
    ended = f" [{reason}]" if reason not in (None, "stop") else ""
    return f"row {number}{ended}: {safe_name(text, MAX_TEXT_CHARS)}"


@click.command()
@click.argument("run")
@click.option("--price-per-hour", type=click.FloatRange(0), help="What a worker's machine costs.")
@click.option(
    "--out",
    type=click.Path(dir_okay=False),
    help="Write the page into this file, not in the run's folder.",
)
@click.pass_obj
def report(
    connection: redis.Redis, /, run: str, price_per_hour: float | None, out: str | None
) -> None:
    """Print where a finished run's page is, or write it anew elsewhere.

    RUN is its id or its output folder, on this machine or in a store whose keys are in the environment.
    """
    if price_per_hour is not None and out is None:
        raise click.UsageError("--price-per-hour makes another page: name a file for it with --out")
    found = client.run(run, connection=connection)
    folder, name = found.output, REPORT if out is None else MANIFEST
    try:  # a folder's page needs no pyarrow, which producers may lack
        text = (
            reader_of(found).text(name)
            if is_stored(folder)
            else Path(folder, name).read_text("utf-8")
        )
    except (OSError, InputNotFound) as error:
        raise InvalidJob(f"{error}: a run has a report when it is finished") from None
    if out is None:
        click.echo(os.path.join(folder, REPORT))
        return
    if Path(out).resolve().is_relative_to(Path(folder).resolve()):
        raise InvalidJob(
            f"{out} lies in the folder of a finished run, which stays as it is: name a file elsewhere"
        )
    try:
        page = report_html(json.loads(text), price_per_hour)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidJob(
            f"{folder} has no manifest of this version of Tokenmill: {error}"
        ) from None
    Path(out).write_text(page, encoding="utf-8")
    click.echo(out)


#: Exit codes: some row differs; nothing could be compared.
DIFFERENT, NOT_VERIFIED = 1, 2

_COUNTS = """run {run}: {rows_checked:,} of {rows:,} rows checked
equal      {rows_equal:,}
different  {rows_different:,}
left out   {rows_not_compared:,}, which the run has an error for, and {rows_of_other_models:,} of other models"""


def _to_verify(connection: redis.Redis, run: str) -> tuple[str, str, str, str | None]:
    """Return a finished run's queue, its folder as workers name it, its id and model. Raises InvalidJob, UnknownRun.

    If Redis has forgotten the run, they are read from its folder.
    """
    named, output = named_run(connection, run)
    try:
        planned = read_planned(connection, named)
    except UnknownRun:
        if output is None:
            raise
        _check_finished(named, output.state)
        return DEFAULT_QUEUE, output.plan.spec.output, named, output.plan.model.fingerprint
    _check_finished(planned.run, planned.state)
    if planned.workers and planned.awaited_model is not None:
        raise InvalidJob(
            f"run {planned.run} cannot be verified: none serves its model {planned.awaited_model}"
        )
    facts = RunState(connection, planned.run).facts()
    return planned.queue, facts["output"], planned.run, facts.get("model")


def _check_finished(run: str, state: str) -> None:
    if state != "finished":
        raise InvalidJob(f"run {run} cannot be verified: it is not finished, but {state}")


@click.command()
@click.argument("run")
@click.option(
    "--sample", default="1%", show_default=True, help="How many: a share of the rows, or a number."
)
@click.option(
    "--seed", type=int, default=0, show_default=True, help="Another one takes other rows."
)
@click.option(
    "--queue",
    help=f"Whose workers do it; by default the run's own, {DEFAULT_QUEUE} where Redis forgot it.",
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print what was found as JSON, long values whole."
)
@click.pass_obj
def verify(
    connection: redis.Redis, /, run: str, sample: str, seed: int, queue: str | None, as_json: bool
) -> None:
    """Compute rows of a finished run again, and compare.

    RUN is its id, or its output folder if Redis has forgotten the run. A worker of the run's queue and model asks
    a sample of the rows once more. It compares texts, reasons and counts of tokens with the run's parts, and writes
    nothing. Exits with 0 if all are equal, 1 if some differ, 2 if it cannot tell. Differences may come from
    rounding, unless TOKENMILL_DETERMINISTIC=1 was set for both the run and verify.
    """
    try:
        with errors_told():
            own_queue, folder, named, model = _to_verify(connection, run)
            arguments = {
                "run": named,
                "plan": os.path.join(folder, PLAN),
                "sample": sample,
                "seed": seed,
            }
            found = try_job(connection, queue or own_queue, "jobs.verify_rows", arguments, model)
    except click.ClickException as error:
        error.show()
        sys.exit(NOT_VERIFIED)
    told = [_COUNTS.format(**found)]
    for each in found["differences"]:
        told.append(f"row {each['row']}, column {each['column']}")
        for name in ("recorded", "computed"):
            told.append(f"  {name}   {safe_name(json.dumps(each[name], ensure_ascii=False))}")
    click.echo(json.dumps(found, ensure_ascii=False) if as_json else "\n".join(told))
    nothing = found["rows_not_compared"] and not found["rows_checked"]
    sys.exit(DIFFERENT if found["rows_different"] else NOT_VERIFIED if nothing else 0)
