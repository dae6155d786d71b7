"""What the jobs have answered that a job depends on, as their results in Redis say."""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from redis.exceptions import ResponseError

from jobs.common.display import safe_name
from jobs.common.rq_jobs import NO_JSON_VALUE, ResultType, dependency_ids, job_key, result_type, results_key
from jobs.common.stored import text
from jobs.context import JobContext
from jobs.errors import AnswerMissing, InvalidJob

#: As many as one job holds prompts.
MAX_DEPENDENCIES = 10_000

#: Jobs that are asked for at a time: their results come in one reply.
TOGETHER = 16

_FAILED = (ResultType.FAILED, ResultType.STOPPED, ResultType.MAX_RETRIES_EXCEEDED)
_FAILED_STATUSES = ("failed", "stopped", "canceled")


@dataclass(frozen=True)
class Dependencies:
    """The jobs that a job depends on, in the order of `depends_on`.

    results: what each returned; None of one that did not end well. answers: see answer_of. nulls: for each
    whose answer is null, why.
    """

    results: Sequence[Any]
    answers: Sequence[Any]
    nulls: Sequence[str]


def read_dependencies(context: JobContext) -> Dependencies:
    """Read what the jobs ended with on which the context's job depends.

    Raises AnswerMissing where one has left nothing, InvalidJob where there is none, or where their results
    are larger together than one of a worker's may be.
    """
    ids = dependency_ids(context.connection, context.job_id)
    if not ids:
        raise InvalidJob("a template over answers needs jobs to depend on: name them in depends_on")
    if len(ids) > MAX_DEPENDENCIES:
        raise InvalidJob(f"the job depends on {len(ids)} jobs, more than the limit of {MAX_DEPENDENCIES}")
    results, answers, nulls, left = [], [], [], context.max_result_bytes
    for start in range(0, len(ids), TOGETHER):
        context.check_interrupted()
        for job_id, ended, status in _ends(context, ids[start : start + TOGETHER]):
            left -= len(ended.get(b"return_value") or b"")
            if left < 0:
                raise InvalidJob(
                    "the results of the jobs that this one depends on have more than "
                    f"{context.max_result_bytes} bytes: depend on fewer jobs, or raise the worker's setting "
                    "TOKENMILL_MAX_RESULT_BYTES"
                )
            value, why = _value(job_id, ended, status)
            results.append(value)
            answers.append(answer_of(value))
            if answers[-1] is None:
                nulls.append(f"answers[{len(answers) - 1}] is null, job {safe_name(job_id)} {why}")
    return Dependencies(results, answers, nulls)


def answer_of(value: Any) -> Any:
    """Return what stands for a job's value as its answer.

    Of `jobs.complete` and `jobs.chat` the text, of several choices a list of texts, null for one that failed;
    of `jobs.classify` the label; any other value as it is.
    """
    if not isinstance(value, dict):
        return value
    if value.get("object") == "classification":
        return value.get("label")
    choices = value.get("choices")
    if value.get("object") not in ("text_completion", "chat.completion") or not isinstance(choices, list):
        return value
    texts = [_text_of(choice) for choice in choices]
    return texts[0] if len(texts) == 1 else texts


def _text_of(choice: Any) -> Any:
    if not isinstance(choice, dict) or choice.get("finish_reason") == "error":
        return None
    message = choice.get("message")
    return message.get("content") if isinstance(message, dict) else choice.get("text")


def _ends(context: JobContext, ids: Sequence[str]) -> list[tuple[str, dict[bytes, bytes], str]]:
    """Return of each job what it ended with last, {} for nothing, and its status, "" where it is gone."""
    with context.connection.pipeline(transaction=False) as pipe:
        for job_id in ids:
            pipe.xrevrange(results_key(job_id), count=1)
            pipe.hget(job_key(job_id), "status")
        found = pipe.execute(raise_on_error=False)
    for reply in found:
        if isinstance(reply, Exception) and not isinstance(reply, ResponseError):
            raise reply
    ends = []
    for job_id, entries, status in zip(ids, found[::2], found[1::2], strict=True):
        if isinstance(entries, ResponseError) or isinstance(status, ResponseError):
            raise AnswerMissing(safe_name(job_id), "its keys in Redis are damaged")
        ends.append((job_id, entries[0][1] if entries else {}, text(status or b"")))
    return ends


def _value(job_id: str, ended: dict[bytes, bytes], status: str) -> tuple[Any, str]:
    """Return a job's value and, where that is None, what became of the job. Raises AnswerMissing."""
    kind = result_type(ended)
    if kind is ResultType.SUCCESSFUL:
        return _parsed(job_id, ended.get(b"return_value")), "returned nothing"
    if kind in _FAILED or (kind is None and status in _FAILED_STATUSES):
        return None, f"has {'failed' if kind in _FAILED else status}"
    if not status:
        what = "job and result are gone: enqueue it anew, with a longer result_ttl"
    else:
        what = f"it has left no result, and its status is {safe_name(status)!r}"
    raise AnswerMissing(safe_name(job_id), what)


def _parsed(job_id: str, packed: bytes | None) -> Any:
    if packed is None:
        return None
    try:
        value = json.loads(b64decode(packed))
    except (ValueError, RecursionError):
        raise AnswerMissing(
            safe_name(job_id), "its result is no JSON: enqueue it on a queue with RQ's JSON serializer"
        ) from None
    if value == NO_JSON_VALUE:
        raise AnswerMissing(safe_name(job_id), "what it returned has no JSON: return texts, lists and dicts")
    return value
