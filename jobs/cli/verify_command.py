"""`tokenmill verify`: rows of a finished run, computed again."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click
import redis

from ..common.shown import MAX_TEXT_CHARS, safe_name
from ..errors import CannotVerify, InvalidValue, UnknownRun
from ..runs.names import PLAN
from ..runs.output import named_run
from ..runs.row_sample import RowSample
from ..runs.snapshot import read_planned
from ..runs.state import RunState
from ..runs.trials import Trial, try_job
from .errors_told import errors_told

#: Exit codes: some row differs; nothing could be compared.
DIFFERENT, NOT_VERIFIED = 1, 2

_ADVICE = (
    "By default differences may come from rounding, as the last digits follow what is computed beside a row. "
    "Workers with TOKENMILL_DETERMINISTIC=1 for both, run and verify, compute the same bits."
)


def _sample(context: click.Context, parameter: click.Parameter, text: str) -> str:
    try:
        RowSample.parse(text)
    except InvalidValue as error:
        raise click.BadParameter(str(error), context, parameter) from None
    return text


@click.command()
@click.argument("run")
@click.option(
    "--sample",
    default="1%",
    show_default=True,
    callback=_sample,
    help="How many: a share of the rows, at least one, or a number.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Another one takes other rows.")
@click.option("--json", "as_json", is_flag=True, help="Print what was found as JSON.")
@click.pass_obj
def verify(connection: redis.Redis, /, run: str, sample: str, seed: int, as_json: bool) -> None:
    """Compute rows of a finished run again, and compare.

    RUN is its id or its output folder. A worker of the run's queue that serves its model asks a sample of the
    rows once more and compares texts, reasons and counts of tokens with what the run's parts hold; nothing is
    written. Exits with 0 where all are equal, 1 where some differ, 2 where that cannot be said.
    """
    with _cannot_verify(), errors_told():
        trial, queue, model = _trial(connection, run)
        found = try_job(
            connection, queue, Trial("jobs.verify_rows", {**trial, "sample": sample, "seed": seed}), model
        )
        click.echo(json.dumps(found, ensure_ascii=False) if as_json else "\n".join(_lines(found)))
    if found["rows_different"]:
        sys.exit(DIFFERENT)
    if found["rows_not_compared"] and not found["rows_checked"]:
        sys.exit(NOT_VERIFIED)


class _NotVerified(click.ClickException):
    exit_code = NOT_VERIFIED


@contextmanager
def _cannot_verify() -> Iterator[None]:
    """Give errors the exit code that tells them from rows that differ."""
    try:
        yield
    except click.ClickException as error:
        raise _NotVerified(error.message) from error


def _trial(connection: redis.Redis, name: str) -> tuple[dict[str, Any], str, str | None]:
    """Return what names the run to a worker, its queue, and its model. Raises UnknownRun or CannotVerify."""
    run, output = named_run(connection, name)
    try:
        snapshot = read_planned(connection, run)
    except UnknownRun:
        if output is None:
            raise
        reason = "this Redis does not know it any more: submit it again, which finds its parts, then verify"
        raise CannotVerify(run, reason) from None
    if snapshot.state != "finished":
        raise CannotVerify(snapshot.run, f"it is not finished, but {snapshot.state}")
    if snapshot.workers and snapshot.awaited_model is not None:
        reason = f"no worker on queue {snapshot.queue!r} serves its model {snapshot.awaited_model}"
        raise CannotVerify(snapshot.run, reason)
    facts = RunState(connection, snapshot.run).facts()
    plan = os.path.join(facts["output"], PLAN)
    return {"run": snapshot.run, "plan": plan}, snapshot.queue, facts.get("model")


def _lines(found: dict[str, Any]) -> list[str]:
    checked, failed = found["rows_checked"], found["rows_not_compared"]
    lines = [
        f"run {found['run']}: {checked:,} of {found['rows']:,} rows checked",
        f"equal      {found['rows_equal']:,}",
        f"different  {found['rows_different']:,}",
        f"left out   {failed:,}, which the run has an error for",
    ]
    for each in found["differences"]:
        lines.append(f"row {each['row']}, column {each['column']}")
        lines.append(f"  recorded   {_shown(each['recorded'])}")
        lines.append(f"  computed   {_shown(each['computed'])}")
    return [*lines, *([_ADVICE] if found["rows_different"] else [])]


def _shown(value: Any) -> str:
    return safe_name(json.dumps(value, ensure_ascii=False), MAX_TEXT_CHARS)
