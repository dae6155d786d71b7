"""`tokenmill preview` and `tokenmill submit --dry-run`. Each enqueues a job, awaits its result, and removes the job."""

import json
import sys
import time
from collections.abc import Mapping
from typing import Any
from uuid import uuid4

import click
import redis

from jobs.cli.run_options import input_options, prompt_options, run_arguments
from jobs.common.display import duration_text, plural, price_text, safe_name
from jobs.common.keys import FORMAT, FORMAT_FIELD, MODEL_FIELD
from jobs.common.rq_jobs import JobStatus, job_key, job_queue, job_status, last_result, results_key
from jobs.common.workers import read_workers
from jobs.errors import TrialFailed
from jobs.runs.plans.spec import RunSpec
from jobs.runs.redis_state.shard_jobs import read_earlier
from jobs.runs.redis_state.submission import Submission
from jobs.runs.watching.failures import failure_text
from jobs.runs.watching.snapshot import WAITING, no_worker_text

#: The most characters of one prompt or answer that are shown.
MAX_SHOWN_CHARS = 20_000
#: Seconds between two checks of the job's status.
POLL_S = 0.05
#: Seconds between two checks whether a worker listens.
WORKERS_EVERY_S = 2.0
#: Seconds without a worker after which the command fails.
PATIENCE_S = 3.0
#: The job's timeout in seconds. RQ's default of 3 minutes is too short for tokenizing a large file.
TIMEOUT_S = 3600

#: The most rows that a dry run reads. The worker holds the requests of all these rows in memory.
MAX_ROWS_READ = 1_000_000

#: A run's time usually lies between these multiples of the time that its tried rows suggest. It did so in 22 of 23 runs
#: of the demo's model, on two cores with other work. There were runs of each kind, and most took 5 to 30 s. Without
#: other work, a run's time varies less.
LIKELY_MULTIPLES = (0.7, 2.4)


@click.command()
@click.option(
    "--rows", type=click.IntRange(1, 1000), default=3, show_default=True, help="How many rows."
)
@click.option("--no-answers", is_flag=True, help="Show only prompts and their tokens.")
@input_options
@prompt_options
@click.pass_obj
def preview(
    connection: redis.Redis, /, rows: int, queue: str, no_answers: bool, **options: Any
) -> None:
    """Show prompts and answers of a run's first rows.

    A worker of the queue renders the prompts, counts their tokens and answers them. Nothing is written.
    """
    result = survey(
        connection, queue, {**options, "limit": rows}, first=rows, answers=not no_answers
    )
    for row in result["shown"]:
        _show(row)
    for line in _reasons(result):
        click.echo(line, err=True)
    has_failures = result["rows_failing"] or result["num_failed"]
    sys.exit(1 if has_failures else 0)


def dry_run_lines(result: dict[str, Any], price_per_hour: float | None) -> list[str]:
    """Return lines about what a dry run has found. price_per_hour: the price of a worker's machine, in any currency."""
    return [*_lines_of_all_rows(result), *_lines_of_tried_rows(result, price_per_hour)]


def _lines_of_all_rows(result: dict[str, Any]) -> list[str]:
    """Return lines about what a dry run learns without asking a prompt: rows that would fail, and tokens of prompts."""
    reused = ""
    if result["rows_reused"]:
        reused = f"; {result['rows_reused']:,.0f} are answered by earlier runs"
    basis = ""
    if result["rows_read"] != result["num_rows"]:
        basis = f", estimated from {result['rows_read']:,} of them"
    lines = [
        f"rows     {result['num_rows']:,}, of which {result['rows_failing']:,.0f} would fail{reused}{basis}"
    ]
    for reason in _reasons(result):
        lines.append(f"         {reason}")
    repeated_rows = _counted(result["rows_repeated"], "row")
    verb = "repeats" if round(result["rows_repeated"]) == 1 else "repeat"
    lines += [
        f"asked    {_counted(result['requests'], 'prompt')}; {repeated_rows} {verb} an earlier one",
        f"prompts  {_counted(result['prompt_tokens'], 'token')}; shared beginnings of the asked prompts save about "
        f"{result['cached_tokens']:,.0f}",
    ]
    return lines


def _counted(number: float, noun: str) -> str:
    """Return a number, rounded, with its noun."""
    rounded = float(f"{number:.0f}")
    return f"{rounded:,.0f} {plural(noun, rounded)}"


def _lines_of_tried_rows(result: dict[str, Any], price_per_hour: float | None) -> list[str]:
    """Return lines about what the answered rows of a dry run suggest: answer tokens, the run's time and its cost."""
    num_tried = result["num_tried"]
    num_failed = result["num_failed"]
    commonest = result.get("commonest_failure")  # missing if the worker's version is older
    why = f": {safe_name(commonest)}" if commonest else ""
    if num_failed and num_failed == num_tried:
        tried_rows = f"all {num_tried} rows that were tried"
        if num_tried == 1:
            tried_rows = "the only row that was tried"
        return [f"but      {tried_rows} failed, so the run's time and cost are not known{why}"]

    lines = []
    seconds = result["seconds"]
    # Embeddings and scores have no tokens of answers.
    if result["completion_tokens"]:
        lines.append(
            f"answers  {_counted(result['completion_tokens'], 'token')}, of which {result['generated_tokens']:,.0f} "
            f"are computed, estimated from {_counted(num_tried, 'row')}"
        )
    lines.append(
        f"time     {duration_range(seconds)} on one worker like this one, alone with the run"
    )
    escalated = result.get("rows_escalated")
    if escalated:
        lines.append(
            f"again    {_counted(escalated, 'row')}, by the second model; time and cost leave these out"
        )
    if num_failed:
        lines.append(f"but      {num_failed} of the {num_tried} rows that were tried failed{why}")
    if price_per_hour is not None:
        price = seconds / 3600 * price_per_hour
        low, high = [price_text(price * factor) for factor in LIKELY_MULTIPLES]
        lines.append(f"cost     {low} to {high} at {price_per_hour:g} an hour")
    return lines


def duration_range(seconds: float) -> str:
    """Return the likely range of a run's time. seconds: the time that its tried rows suggest."""
    low, high = [duration_text(seconds * factor) for factor in LIKELY_MULTIPLES]
    if low == high:
        return f"about {low}"
    return f"{low} to {high}"


def survey(
    connection: redis.Redis, queue: str, options: dict[str, Any], **extent: Any
) -> dict[str, Any]:
    """Have a worker survey a run. Returns the result of jobs.survey_parquet.

    options: the run's options. extent: the arguments of jobs.survey_parquet that say how many rows to read and answer.
    """
    # The arguments of a run must name an output, although a survey writes nothing.
    all_arguments = run_arguments({"output": "/dev/null", **options})
    submission, arguments = Submission.split(queue, all_arguments)
    survey_arguments = {
        **RunSpec.from_arguments(**arguments).to_json(),
        **extent,
        "reuse": list(submission.reuse),
        "reuse_from_any_model": submission.reuse_from_any_model,
    }
    return try_job(connection, queue, "jobs.survey_parquet", survey_arguments, submission.model)


def try_job(
    connection: redis.Redis,
    queue: str,
    function_name: str,
    arguments: Mapping[str, Any],
    model: str | None = None,
) -> dict[str, Any]:
    """Enqueue a job, return its result, and delete the job. Raises TrialFailed if it fails, or if no worker listens."""
    job_id = f"trial-{uuid4().hex}"
    try:
        with connection.pipeline() as pipe:
            job_queue(connection, queue).enqueue_call(
                function_name,
                kwargs=dict(arguments),
                timeout=TIMEOUT_S,
                result_ttl=TIMEOUT_S,
                failure_ttl=TIMEOUT_S,
                description=function_name,
                job_id=job_id,
                pipeline=pipe,
            )
            pipe.hset(job_key(job_id), FORMAT_FIELD, str(FORMAT))
            if model is not None:
                pipe.hset(job_key(job_id), MODEL_FIELD, model)
            pipe.execute()
        status = _await_end(connection, queue, job_id)
        if status is not JobStatus.FINISHED:
            raise TrialFailed(failure_text(connection, job_id))
        result: dict[str, Any] = json.loads(last_result(connection, job_id))
        return result
    finally:
        with connection.pipeline() as pipe:
            for job in read_earlier(connection, [job_id]):  # the job, if Redis still has it
                job.delete(pipe)
            pipe.delete(results_key(job_id))
            pipe.execute()


def _await_end(connection: redis.Redis, queue: str, job_id: str) -> JobStatus | None:
    """Wait until a job has ended. Returns its status. Raises TrialFailed if no worker listens on the queue."""
    last_served_at = time.monotonic()
    next_check_at = last_served_at
    while True:
        status = job_status(connection.hget(job_key(job_id), "status"))
        if status not in WAITING:
            return status
        now = time.monotonic()
        if now >= next_check_at:
            next_check_at = now + WORKERS_EVERY_S
            served_queues: set[str] = set()
            for worker in read_workers(connection):
                served_queues.update(worker.queues)
            if queue in served_queues:
                last_served_at = now
            elif now - last_served_at > PATIENCE_S:
                raise TrialFailed(no_worker_text(queue, sorted(served_queues)))
        time.sleep(POLL_S)


def _show(row: dict[str, Any]) -> None:
    """Print a row of a preview: its prompt, then its error or its answer."""
    click.echo(f"row {row['row']}: {row['prompt_tokens']} {plural('token', row['prompt_tokens'])}")
    if row.get("tools") is not None:
        click.echo(f"  tools: {_text(row['tools'])}")
    for message in row["prompt"]:
        role = safe_name(str(message.get("role")))
        click.echo(f"  {role}: {_text(message.get('content'))}")
        for name, value in message.items():
            if name not in ("role", "content"):  # such as tool_calls
                click.echo(f"    {safe_name(str(name))}: {_text(value)}")
    if row.get("error") is not None:
        click.echo(f"  error: {_text(row['error'])}")
    elif row.get("label") is not None:
        click.echo(f"  label: {_text(row['label'])}")
        for label, probability in row["probabilities"]:
            click.echo(f"    {probability:.4f} {_text(label)}")
    elif "completions" in row:
        for reason, text in row["completions"]:
            click.echo(f"  answer ({reason}): {_text(text)}")
        for calls in row.get("tool_calls") or ():
            click.echo(f"    tool_calls: {_text(calls)}")
        click.echo(f"  {row['tokens']} {plural('token', row['tokens'])}")


def _text(value: Any) -> str:
    """Return a value as a terminal shows it, without control characters.

    A text is shown as it is, and any other value as JSON. A long text is cut. Lines after the first are indented.
    """
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    shown_text = text[:MAX_SHOWN_CHARS]
    lines = [safe_name(line, MAX_SHOWN_CHARS) for line in shown_text.split("\n")]
    if len(text) > MAX_SHOWN_CHARS:
        lines[-1] += " ..."
    return "\n    ".join(lines)


def _reasons(result: dict[str, Any]) -> list[str]:
    """Return a line for each reason why rows would fail."""
    lines = []
    for reason in result["reasons"]:
        first_row = f"row {reason['examples'][0]}"
        num_rows = reason["rows"]
        failing = f"{first_row} would fail"
        if num_rows > 1:
            failing = f"{num_rows:,} of the rows read would fail, the first is {first_row}"
        lines.append(f"{failing}: {safe_name(reason['text'])}")
    return lines
