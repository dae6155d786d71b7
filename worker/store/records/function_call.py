"""What a job's payload calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rq.serializers import JSONSerializer

from worker.errors import BadPayload
from worker.store.records.bounds import check_payload


@dataclass(frozen=True)
class FunctionCall:
    """A job's payload: a dotted name and its arguments. Nothing of it has been imported."""

    name: str
    args: list[Any]
    kwargs: dict[str, Any]


def parse_call(payload: bytes, max_job_bytes: int) -> FunctionCall:
    """Parse a payload's JSON. Raises BadPayload, or TooLarge before it is parsed."""
    check_payload(payload, max_job_bytes)
    try:
        name, instance, args, kwargs = JSONSerializer.loads(payload)
    except Exception as error:
        raise BadPayload(
            "the payload is not JSON: enqueue with the JSON serializer (rq enqueue -S json, or "
            'Queue(..., serializer="json")); other payloads are never loaded'
        ) from error
    if not (isinstance(name, str) and isinstance(args, list) and isinstance(kwargs, dict)):
        raise BadPayload("the payload is JSON, but not [function name, null, [arguments], {keywords}]")
    if instance is not None:
        raise BadPayload("the payload calls a method of an object; only plain functions run here")
    return FunctionCall(name, args, kwargs)
