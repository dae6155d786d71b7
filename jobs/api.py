"""The functions a producer enqueues, as a stock `rq worker` runs them.

`worker.BatchWorker` never calls these: it builds the same tasks through table.py and packs them into one
batch.
"""

from __future__ import annotations

from typing import Any


def complete(
    prompt: str | list[Any] | None = None,
    *,
    prompt_template: str | None = None,
    model: str | None = None,
    **sampling: Any,
) -> dict[str, Any]:
    """Complete a string, token ids, or a list of either; return OpenAI's `text_completion`.

    prompt_template: instead of a prompt, Jinja over `answers` and `results` of the jobs that this one depends
    on, in the order of `depends_on`. model: the served model's name, path or hub id; any other is refused.
    sampling: keyword arguments of engine.SamplingParams. Raises InvalidJob, AnswerMissing, or RequestFailed
    naming the prompt that the engine refused.
    """
    from .stock_worker import run_task

    template = {} if prompt_template is None else {"prompt_template": prompt_template}
    return run_task("jobs.complete", (prompt,), {**template, "model": model, **sampling})  # type: ignore[no-any-return]


def chat(
    messages: list[dict[str, Any]] | None = None,
    *,
    messages_template: list[dict[str, str]] | None = None,
    model: str | None = None,
    **sampling: Any,
) -> dict[str, Any]:
    """Answer a chat of {'role', 'content'} messages; return OpenAI's `chat.completion`.

    messages_template: instead of messages, such whose contents are Jinja, as in `complete`. model: the served
    model's name, path or hub id; any other is refused. sampling: keyword arguments of engine.SamplingParams.
    Raises InvalidJob, AnswerMissing or RequestFailed.
    """
    from .stock_worker import run_task

    template = {} if messages_template is None else {"messages_template": messages_template}
    return run_task("jobs.chat", (messages,), {**template, "model": model, **sampling})  # type: ignore[no-any-return]


def score_parquet(
    input: str | list[str],
    output: str,
    prompt_column: str = "prompt",
    messages_column: str | None = None,
    template: str | list[dict[str, str]] | None = None,
    sampling: dict[str, Any] | None = None,
    rows_per_shard: int = 1000,
    queue: str | None = None,
    model: str | None = None,
    filename_column: str | None = None,
    redo_damaged: bool = False,
    max_errors: int | str | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Plan a Parquet run and enqueue its shards, or resume it; return the run's id and counts.

    The arguments and errors are those of jobs.parquet.planner.score_parquet, which this calls; the options
    those of jobs.runs.spec.RunSpec.from_arguments.
    """
    from .stock_worker import run_own_function

    named = {
        "prompt_column": prompt_column,
        "messages_column": messages_column,
        "template": template,
        "sampling": sampling,
        "rows_per_shard": rows_per_shard,
        "queue": queue,
        "model": model,
        "filename_column": filename_column,
        "redo_damaged": redo_damaged,
        "max_errors": max_errors,
    }
    return run_own_function("jobs.score_parquet", (input, output), {**named, **options})  # type: ignore[no-any-return]


def survey_parquet(input: str | list[str], **arguments: Any) -> dict[str, Any]:
    """Look at what a run would ask, and write nothing; for `tokenmill preview` and `submit --dry-run`.

    The arguments and errors are those of jobs.parquet.survey.survey_parquet.
    """
    from .stock_worker import run_own_function

    return run_own_function("jobs.survey_parquet", (input,), arguments)  # type: ignore[no-any-return]


def score_shard(run: str, plan: str, shard: int) -> dict[str, Any]:
    """Score one shard of a planned run; enqueued by score_parquet only."""
    from .stock_worker import run_task

    return run_task("jobs.score_shard", (run, plan, shard), {})  # type: ignore[no-any-return]
