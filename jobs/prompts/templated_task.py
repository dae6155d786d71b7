"""Fills the answers of earlier jobs into the template of a job's prompt.

The job depends on these earlier jobs. Their answers are read from Redis.
"""

import json
from base64 import b64decode
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jobs.common.display import brief, safe_name
from jobs.common.rq_jobs import (
    NO_JSON_VALUE,
    ResultType,
    dependency_ids,
    job_key,
    result_type,
    results_key,
)
from jobs.common.stored import text
from jobs.context import JobContext
from jobs.errors import AnswerMissing, InvalidJob, InvalidValue, check_limit
from jobs.prompts.template_texts import JinjaTexts, TemplateProblem, template_texts, with_breaks
from jobs.tasks import LateTask, Task

MAX_DEPENDENCIES = 10_000
#: The most jobs whose results are read in one round trip.
MAX_READ_AT_ONCE = 16

_FAILED = (ResultType.FAILED, ResultType.STOPPED, ResultType.MAX_RETRIES_EXCEEDED)
_FAILED_STATUSES = ("failed", "stopped", "canceled")


def read_dependencies(context: JobContext) -> dict[str, list[Any]]:
    """Return the results of the jobs on which a job depends, as a template's values. Raises AnswerMissing, InvalidJob.

    `results` is a list of what the jobs returned. `answers` is a list of the texts in these results. Both lists have
    None for a failed job.
    """
    ids = dependency_ids(context.connection, context.job_id)
    if not ids:
        raise InvalidJob(
            "the template needs answers of other jobs, and the job depends on none: name them in depends_on"
        )
    check_limit(len(ids), MAX_DEPENDENCIES, "the job depends on {} jobs")
    results = []
    bytes_left = context.max_result_bytes
    for start in range(0, len(ids), MAX_READ_AT_ONCE):
        context.check_interrupted()
        for outcome in _read_outcomes(context, ids[start : start + MAX_READ_AT_ONCE]):
            returned = outcome.result.get(b"return_value") or b""
            bytes_left -= len(returned)
            if bytes_left < 0:
                raise InvalidJob(
                    "the results of the jobs that this one depends on have more than "
                    f"{context.max_result_bytes} bytes: depend on fewer jobs, or raise the worker's setting "
                    "TOKENMILL_MAX_RESULT_BYTES"
                )
            results.append(_value(outcome))
    return {"answers": list(map(answer_of, results)), "results": results}


def answer_of(value: Any) -> Any:
    """Return the text of a job's result: the text of its one choice, a list of its choices' texts, or a label.

    A choice that failed becomes None. A value of another form is returned as it is.
    """
    if not isinstance(value, dict):
        return value
    if value.get("object") == "classification":
        return value.get("label")
    choices = value.get("choices")
    is_completion = value.get("object") in ("text_completion", "chat.completion")
    if not is_completion or not isinstance(choices, list):
        return value
    texts = [_text_of(choice) for choice in choices]
    return texts[0] if len(texts) == 1 else texts


def _text_of(choice: Any) -> Any:
    """Return the text of a choice of a prompt or chat; None for a choice that failed."""
    if not isinstance(choice, dict) or choice.get("finish_reason") == "error":
        return None
    message = choice.get("message")
    if isinstance(message, dict):
        return message.get("content")
    return choice.get("text")


class _Outcome(NamedTuple):
    """How a job has ended: the last entry of its results, and its status. Both are empty if Redis has lost them."""

    job_id: str
    result: dict[bytes, bytes]
    status: str


def _read_outcomes(context: JobContext, ids: Sequence[str]) -> list[_Outcome]:
    """Read how jobs have ended, in the order of the ids."""
    with context.connection.pipeline(transaction=False) as pipe:
        for job_id in ids:
            pipe.xrevrange(results_key(job_id), count=1)
            pipe.hget(job_key(job_id), "status")
        replies = iter(pipe.execute())
    outcomes = []
    for job_id in ids:
        entries = next(replies)
        status = next(replies)
        result: dict[bytes, bytes] = {}
        if entries:
            _, result = entries[0]
        outcomes.append(_Outcome(job_id, result, text(status or b"")))
    return outcomes


def _value(outcome: _Outcome) -> Any:
    """Return what a job returned; None for a failed job. Raises AnswerMissing."""
    kind = result_type(outcome.result)
    if kind is ResultType.SUCCESSFUL:
        return _parsed(outcome.job_id, outcome.result.get(b"return_value"))
    has_failed_status = kind is None and outcome.status in _FAILED_STATUSES
    if kind in _FAILED or has_failed_status:
        return None
    if not outcome.status:
        problem = "job and result are gone: enqueue it again, with a longer result_ttl"
    else:
        problem = f"it has left no result, and its status is {safe_name(outcome.status)!r}"
    raise AnswerMissing(safe_name(outcome.job_id), problem)


def _parsed(job_id: str, packed: bytes | None) -> Any:
    """Return the value that a job returned. packed: its JSON as base64. Raises AnswerMissing."""
    if packed is None:
        return None
    try:
        value = json.loads(b64decode(packed))
    except (ValueError, RecursionError):
        raise AnswerMissing(
            safe_name(job_id),
            "its result is no JSON: enqueue it on a queue with RQ's JSON serializer",
        ) from None
    if value == NO_JSON_VALUE:
        raise AnswerMissing(
            safe_name(job_id), "its return value has no JSON form: return texts, lists and dicts"
        )
    return value


#: The names that a template over answers may use.
NAMES = frozenset({"answers", "results"})

ARGUMENTS = ("prompt_template", "messages_template")


def templated_task(
    argument: str, template: Any, make: Callable[[Any], Task], *, tokens_are_text: bool
) -> Task:
    """Return a task that fills in the template when it is opened. Raises InvalidJob.

    argument: one of ARGUMENTS. make: called with the prompt or the messages; returns their task.
    tokens_are_text: whether control tokens in answers are read as plain text.
    """
    sources, roles = template_texts(template)
    is_chat = roles is not None
    wants_chat = argument == "messages_template"
    if is_chat != wants_chat:
        raise InvalidJob(
            f"{argument} is a {type(template).__name__}: prompt_template must be a text, and messages_template a list"
        )

    def filled(context: JobContext) -> Task:
        """Fill the answers into the template, and make the task from the filled template."""
        jinja_texts = JinjaTexts(sources)
        unknown_names = sorted(jinja_texts.names - NAMES)
        if unknown_names:
            raise InvalidValue(
                f"{argument} names {{}}: it may name `answers`, with an answer of each job that this job depends on, "
                "and `results`, with the whole result of each of these jobs",
                brief(unknown_names[0]),
            )
        values: Any = read_dependencies(context)
        # A break in a control token makes the engine read the token as plain text. In chats, the engine adds the breaks
        # itself.
        if tokens_are_text and roles is None:
            values = with_breaks(values, context.model.control_tokens)
        try:
            texts = jinja_texts.render(values)
        except TemplateProblem as problem:
            raise InvalidValue(f"{argument}: {{}}", str(problem)) from None
        if roles is None:
            return make(texts[0])
        messages = []
        for role, content in zip(roles, texts, strict=True):
            messages.append({"role": role, "content": content})
        return make(messages)

    return LateTask(filled, blocking=True)


def refuse_template(values: dict[str, Any]) -> None:
    """Raise InvalidJob if a request outside a job has a template. Only a job can depend on other jobs."""
    for name in ARGUMENTS:
        if values.get(name) is not None:
            raise InvalidJob(
                f"{name} takes in the answers of other jobs, and only a job can depend on other jobs"
            )
