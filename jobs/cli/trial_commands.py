"""`tokenmill preview`, and what `tokenmill submit --dry-run` does: a look at a run before it is one."""

import json
import sys
from typing import Any

import click
import redis

from jobs.cli.errors_told import errors_told
from jobs.cli.run_options import input_options, prompt_options, run_arguments
from jobs.common.display import duration_text, safe_name
from jobs.runs.plans.spec import RunSpec
from jobs.runs.redis_state.submission import Submission
from jobs.runs.watching.trials import try_job

MAX_SHOWN_CHARS = 20_000

#: More rows are looked at by a share: all their requests are held in the worker's memory.
MAX_ROWS_READ = 1_000_000


@click.command()
@click.argument("files", metavar="FILE...", nargs=-1, required=True)
@click.option("--rows", type=click.IntRange(1, 1000), default=3, show_default=True, help="How many.")
@click.option("--queue", default="bulk", show_default=True, help="Whose workers do it.")
@click.option("--no-answers", is_flag=True, help="Prompts and their tokens alone.")
@input_options
@prompt_options
@click.pass_obj
def preview(connection: redis.Redis, /, rows: int, queue: str, no_answers: bool, **options: Any) -> None:
    """Show prompts and answers of a run's first rows.

    A worker of the queue renders the prompts, counts their tokens and answers them; nothing is written.
    """
    with errors_told():
        found = survey(connection, queue, {**options, "limit": rows}, first=rows, answers=not no_answers)
        for each in found["shown"]:
            _show(each)
        for line in _reasons(found):
            click.echo(line, err=True)
    sys.exit(1 if found["rows_failing"] or found["num_failed"] else 0)


def dry_run_lines(found: dict[str, Any], price_per_hour: float | None) -> list[str]:
    share = "" if found["rows_read"] == found["num_rows"] else f", as {found['rows_read']:,} of them tell"
    reused = f"; {found['rows_reused']:,.0f} are answered by earlier runs" if found["rows_reused"] else ""
    tried, failed, seconds = found["num_tried"], found["num_failed"], found["seconds"]
    lines = [
        f"rows     {found['num_rows']:,}, of which {found['rows_failing']:,.0f} would fail{reused}{share}",
        *(f"         {line}" for line in _reasons(found)),
        f"asked    {found['requests']:,.0f} prompts; {found['rows_repeated']:,.0f} rows repeat an earlier one",
        f"prompts  {found['prompt_tokens']:,.0f} tokens; of those asked, shared beginnings save up to "
        f"{found['cached_tokens']:,.0f}",
        f"answers  {found['completion_tokens']:,.0f} tokens, of which {found['generated_tokens']:,.0f} "
        f"are computed, as {tried} rows tell",
        f"time     about {duration_text(seconds)} on one worker like this one, alone with the run",
    ]
    if failed:
        lines.append(f"but      {failed} of the {tried} rows that were tried failed")
    if found["has_second"]:
        lines.append("but      rows that the second model is asked come on top")
    if price_per_hour is not None:
        lines.append(f"cost     about {seconds / 3600 * price_per_hour:,.2f} at {price_per_hour:g} an hour")
    return lines


def survey(connection: redis.Redis, queue: str, options: dict[str, Any], **how: Any) -> dict[str, Any]:
    submission, own = Submission.split(queue, run_arguments({"output": "/dev/null", **options}))
    how |= {"reuse": list(submission.reuse), "reuse_from_any_model": submission.reuse_from_any_model}
    asked = {**RunSpec.from_arguments(**own).to_json(), **how}
    return try_job(connection, queue, "jobs.survey_parquet", asked, submission.model)


def _show(row: dict[str, Any]) -> None:
    click.echo(f"row {row['row']}: {row['prompt_tokens']} tokens")
    for message in row["prompt"]:
        click.echo(f"  {safe_name(str(message.get('role')))}: {_text(message.get('content'))}")
    if row.get("error") is not None:
        click.echo(f"  error: {_text(row['error'])}")
    elif row.get("label") is not None:
        click.echo(f"  label: {_text(row['label'])}")
        for label, probability in row["probabilities"]:
            click.echo(f"    {probability:.4f} {_text(label)}")
    elif "completions" in row:
        for reason, text in row["completions"]:
            click.echo(f"  answer ({reason}): {_text(text)}")
        click.echo(f"  {row['tokens']} tokens")


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    lines = [safe_name(line, MAX_SHOWN_CHARS) for line in text[:MAX_SHOWN_CHARS].split("\n")]
    return "\n    ".join(lines) + (" ..." if len(text) > MAX_SHOWN_CHARS else "")


def _reasons(found: dict[str, Any]) -> list[str]:
    told = []
    for each in found["reasons"]:
        first, rows = f"row {each['examples'][0]}", each["rows"]
        failing = f"{first} would fail" if rows == 1 else f"{rows:,} rows read would fail, {first} the first"
        told.append(f"{failing}: {safe_name(each['text'])}")
    return told
