"""What a job's payload calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rq.exceptions import DeserializationError
from rq.job import Job

from worker.errors import BadPayload


@dataclass(frozen=True)
class FunctionCall:
    """A job's payload: a dotted name and its arguments. Nothing of it has been imported."""

    name: str
    args: list[Any]
    kwargs: dict[str, Any]


def call_of(job: Job) -> FunctionCall:
    """Read a job's payload. Raises BadPayload, or TooLarge."""
    try:
        name, instance, args, kwargs = job.func_name, job.instance, job.args, job.kwargs
    except DeserializationError as error:
        raise BadPayload(
            "the payload is not JSON: enqueue with the JSON serializer (rq enqueue -S json, or "
            'Queue(..., serializer="json")); other payloads are never loaded'
        ) from error
    if not (isinstance(name, str) and isinstance(args, list) and isinstance(kwargs, dict)):
        raise BadPayload("the payload is JSON, but not [function name, null, [arguments], {keywords}]")
    if instance is not None:
        raise BadPayload("the payload calls a method of an object; only plain functions run here")
    return FunctionCall(name, args, kwargs)
