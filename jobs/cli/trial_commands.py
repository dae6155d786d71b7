"""`tokenmill preview`, and what `tokenmill submit --dry-run` does: a look at a run before it is one."""

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import click
import redis

from jobs.cli.errors_told import errors_told
from jobs.cli.options import run_arguments
from jobs.cli.run_options import input_options, prompt_options
from jobs.common.display import safe_name
from jobs.context.served_model import parse_model
from jobs.runs.plans.embedding_options import EMBED
from jobs.runs.plans.paths import run_path
from jobs.runs.plans.spec import RunSpec, check_queue_name
from jobs.runs.watching.dry_run import NUM_TRIED, Estimate, classification_of, estimate, trial_of
from jobs.runs.watching.trials import Trial, Tried, try_job, try_jobs

#: Of a prompt or an answer that is shown.
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
        survey = _survey(connection, queue, {**options, "limit": rows}, pick=rows, first=True)
        picked, model = survey["picked"], options["model"]
        answers: Sequence[Tried | None] = [None] * len(picked)
        if not no_answers:
            asks_labels = survey["labels"] is not None
            trials = [
                classification_of(each, survey, model) if asks_labels else trial_of(each, model) for each in picked
            ]
            answers = try_jobs(connection, queue, trials, model)
        for each, tried in zip(picked, answers, strict=True):
            _show(each, tried)
        for line in _reasons(survey):
            click.echo(line, err=True)
    if survey["rows_failing"] or any(tried is not None and tried.value is None for tried in answers):
        sys.exit(1)


def tell_dry_run(
    connection: redis.Redis, queue: str, options: dict[str, Any], max_rows: int, price_per_hour: float | None
) -> None:
    """Print what a run would take, and start none."""
    if options["task"] == EMBED:
        raise click.UsageError("--dry-run tells how long answers take, and with --task embed there are none")
    if options["labels"] is not None:
        raise click.UsageError(
            "--dry-run tells how long answers take, and with --labels there are none: see `tokenmill preview`"
        )
    survey = _survey(connection, queue, options, pick=NUM_TRIED, max_rows=max_rows)
    model = options["model"]
    found = estimate(survey, lambda trials: try_jobs(connection, queue, trials, model))
    click.echo("\n".join(dry_run_lines(survey, found, price_per_hour)))


def dry_run_lines(survey: dict[str, Any], found: Estimate, price_per_hour: float | None) -> list[str]:
    """Return what is said of a run."""
    read = survey["rows_read"]
    share = "" if read == survey["rows"] else f", as {read:,} of them tell"
    scale = survey["rows"] / max(1, read)
    reused = f"; {survey['rows_reused'] * scale:,.0f} are answered by earlier runs" if survey["rows_reused"] else ""
    lines = [
        f"rows     {survey['rows']:,}, of which {survey['rows_failing'] * scale:,.0f} would fail{reused}{share}",
        *(f"         {line}" for line in _reasons(survey)),
        f"asked    {survey['requests'] * scale:,.0f} prompts; {survey['rows_repeated'] * scale:,.0f} rows "
        "repeat an earlier one",
        f"prompts  {found.prompt_tokens:,.0f} tokens; of those asked, shared beginnings save up to "
        f"{found.saved_tokens:,.0f}",
        f"answers  {found.completion_tokens:,.0f} tokens, of which {found.generated_tokens:,.0f} "
        f"are computed, as {found.num_tried} rows tell",
        f"time     about {_time(found.seconds)} on one worker like this one, alone with the run",
    ]
    if found.num_failed:
        lines.append(f"but      {found.num_failed} of the {found.num_tried} rows that were tried failed")
    if price_per_hour is not None:
        cost = found.seconds / 3600 * price_per_hour
        lines.append(f"cost     about {cost:,.2f} at {price_per_hour:g} an hour")
    return lines


def _survey(connection: redis.Redis, queue: str, options: dict[str, Any], **how: Any) -> dict[str, Any]:
    """Have a worker look at a run's prompts. Raises what its planning would."""
    arguments = run_arguments({"output": os.devnull, **options})
    model = parse_model(arguments.pop("model", None))
    for name in ("max_errors", "webhook", "on_end"):
        arguments.pop(name, None)
    check_queue_name(queue)
    wishes: dict[str, Any] = {"reuse": list(map(run_path, arguments.pop("reuse", ())))}
    wishes["reuse_from_any_model"] = arguments.pop("reuse_from_any_model", False)
    spec = RunSpec.from_arguments(**arguments)
    told = {name: value for name, value in spec.to_json().items() if value is not None}
    return try_job(connection, queue, Trial("jobs.survey_parquet", {**told, **wishes, **how}), model)


def _show(picked: dict[str, Any], tried: Tried | None) -> None:
    click.echo(f"row {picked['row']}: {picked['prompt_tokens']} tokens")
    messages = picked["prompt"] if picked["is_chat"] else [{"role": "prompt", "content": picked["prompt"]}]
    for message in messages:
        click.echo(f"  {safe_name(str(message.get('role')))}: {_text(message.get('content'))}")
    if tried is None:
        return
    if tried.value is None:
        click.echo(f"  error: {_text(tried.error)}")
        return
    if "probabilities" in tried.value:
        click.echo(f"  label: {_text(tried.value['label'])}")
        for label, probability in tried.value["probabilities"].items():
            click.echo(f"    {probability:.4f} {_text(label)}")
        return
    for choice in tried.value["choices"]:
        text = choice["message"]["content"] if picked["is_chat"] else choice["text"]
        click.echo(f"  answer ({choice['finish_reason']}): {_text(text)}")
    click.echo(f"  {tried.value['usage']['completion_tokens']} tokens")


def _text(value: Any) -> str:
    """Return a prompt as it is shown: lines below it are indented, and nothing in it moves the cursor."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    lines = [safe_name(line, MAX_SHOWN_CHARS) for line in text[:MAX_SHOWN_CHARS].split("\n")]
    return "\n    ".join(lines) + (" ..." if len(text) > MAX_SHOWN_CHARS else "")


def _reasons(survey: dict[str, Any]) -> list[str]:
    told = []
    for each in survey["reasons"]:
        first, rows = f"row {each['row']}", each["rows"]
        failing = f"{first} would fail" if rows == 1 else f"{rows:,} rows read would fail, {first} the first"
        told.append(f"{failing}: {safe_name(each['reason'])}")
    return told


def _time(seconds: float) -> str:
    unit, length = next((each for each in (("h", 3600), ("min", 60)) if seconds >= 2 * each[1]), ("s", 1))
    return f"{seconds / length:.1f} {unit}"
