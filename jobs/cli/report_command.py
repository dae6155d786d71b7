"""`tokenmill report` tells where a finished run's page is; `tokenmill verify` computes rows of one again."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import click
import redis

from jobs import client
from jobs.cli.errors_told import errors_told
from jobs.cli.rows_commands import reader_of
from jobs.cli.trial_commands import try_job
from jobs.common.display import safe_name
from jobs.errors import InputNotFound, InvalidJob
from jobs.runs.plans.names import MANIFEST, PLAN, REPORT
from jobs.runs.plans.paths import is_stored
from jobs.runs.redis_state.state import RunState
from jobs.runs.statistics.report import report_html


@click.command()
@click.argument("run")
@click.option("--price-per-hour", type=click.FloatRange(0), help="What a worker's machine costs.")
@click.option("--out", type=click.Path(dir_okay=False), help="Write the page into this file, not in the run's folder.")
@click.pass_obj
def report(connection: redis.Redis, /, run: str, price_per_hour: float | None, out: str | None) -> None:
    """Print where a finished run's page is, or write it anew elsewhere.

    RUN is its id or its output folder, on this machine or in a store whose keys are in the environment.
    """
    if price_per_hour is not None and out is None:
        raise click.UsageError("--price-per-hour makes another page: name a file for it with --out")
    with errors_told():
        found = client.run(run, connection=connection)
        folder, name = found.output, REPORT if out is None else MANIFEST
        try:  # a folder's page needs no pyarrow, which producers may lack
            text = reader_of(found).text(name) if is_stored(folder) else Path(folder, name).read_text("utf-8")
        except (OSError, InputNotFound) as error:
            raise InvalidJob(f"{error}: a run has a report when it is finished") from None
        if out is None:
            click.echo(os.path.join(folder, REPORT))
            return
        if Path(out).resolve().is_relative_to(Path(folder).resolve()):
            raise InvalidJob(f"{out} lies in the folder of a finished run, which stays as it is: name a file elsewhere")
        try:
            page = report_html(json.loads(text), price_per_hour)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidJob(f"{folder} has no manifest of this version of Tokenmill: {error}") from None
        Path(out).write_text(page, encoding="utf-8")
        click.echo(out)


#: Exit codes: some row differs; nothing could be compared.
DIFFERENT, NOT_VERIFIED = 1, 2

_COUNTS = """run {run}: {rows_checked:,} of {rows:,} rows checked
equal      {rows_equal:,}
different  {rows_different:,}
left out   {rows_not_compared:,}, which the run has an error for, and {rows_of_other_models:,} of other models"""


@click.command()
@click.argument("run")
@click.option("--sample", default="1%", show_default=True, help="How many: a share of the rows, or a number.")
@click.option("--seed", type=int, default=0, show_default=True, help="Another one takes other rows.")
@click.option("--json", "as_json", is_flag=True, help="Print what was found as JSON, long values whole.")
@click.pass_obj
def verify(connection: redis.Redis, /, run: str, sample: str, seed: int, as_json: bool) -> None:
    """Compute rows of a finished run again, and compare.

    RUN is its id or its output folder. A worker of the run's queue that serves its model asks a sample of the
    rows once more and compares texts, reasons and counts of tokens with what the run's parts hold; nothing is
    written. Exits with 0 where all are equal, 1 where some differ, 2 where that cannot be said. Differences
    may come from rounding, unless TOKENMILL_DETERMINISTIC=1 was set for both, run and verify.
    """
    try:
        with errors_told():
            planned = client.run(run, connection=connection).status()
            if planned.state != "finished":
                raise InvalidJob(f"run {planned.run} cannot be verified: it is not finished, but {planned.state}")
            if planned.workers and planned.awaited_model is not None:
                raise InvalidJob(f"run {planned.run} cannot be verified: none serves its model {planned.awaited_model}")
            facts = RunState(connection, planned.run).facts()
            arguments: dict[str, Any] = {"run": planned.run, "plan": os.path.join(facts["output"], PLAN)}
            arguments |= {"sample": sample, "seed": seed}
            found = try_job(connection, planned.queue, "jobs.verify_rows", arguments, facts.get("model"))
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
