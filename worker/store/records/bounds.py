"""Limits of a job's hash, and its function call unpacked within them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rq.serializers import JSONSerializer

from jobs.common.stored import unpacked
from worker.errors import BadPayload, TooLarge

DEFAULT_MAX_JOB_BYTES = 4 << 20
DEFAULT_MAX_HELD_BYTES = 64 << 20
"""Of the jobs of one lane, see packing.py."""

MAX_HASH_FIELDS = 1000
"""RQ writes about 40, and user code may keep some of its own there."""

BYTES_PER_CONTAINER = 40
"""A payload may hold one list or object for so many of the bytes that it may have. Parsed, the smallest ones
take 27 times their text in memory, and ten times as long as other values."""

_MAX_FIELD_BYTES = 1 << 20
"""Of a field beside the payload that is JSON: `meta`, and what says how a job ends."""

_JSON_FIELDS = (b"meta", b"webhooks", b"dependency_ids", b"retry_intervals", b"repeat_intervals")


def max_hash_bytes(max_job_bytes: int) -> int:
    """Return the most bytes of a job's hash in Redis: payload, description, which repeats it, and other fields."""
    return 2 * max_job_bytes + _MAX_FIELD_BYTES


def unpack(packed: bytes, most: int) -> bytes:
    """Unpack a payload as RQ does. Raises TooLarge beyond `most` bytes, without unpacking more."""
    text = unpacked(packed, most)
    if text is None:
        raise TooLarge(
            f"the payload has more than the limit of {most} bytes: split the job, score a Parquet file, "
            "or raise TOKENMILL_MAX_JOB_BYTES"
        )
    return text


def check_containers(what: str, text: bytes, max_bytes: int) -> None:
    """Raise TooLarge for JSON of more lists and objects than `max_bytes` of it may have, before it is parsed."""
    most = max_bytes // BYTES_PER_CONTAINER
    if text.count(b"[") + text.count(b"{") <= most:
        return
    # Brackets in strings do not count. Without escapes, quotes alternate between begin and end; two of them next to
    # each other can go, whatever they are.
    marks = text.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _NO_MARKS).replace(b'""', b"")
    found = sum(map(len, marks.split(b'"')[::2]))
    if found > most:
        raise TooLarge(
            f"the {what} holds {found} lists and objects, more than the limit of {most}: split the job, "
            "score a Parquet file, or raise TOKENMILL_MAX_JOB_BYTES"
        )


_NO_MARKS = bytes(set(range(256)) - set(b'"[{'))


def check_json_fields(values: Mapping[bytes, bytes]) -> None:
    """Raise TooLarge for a field beside the payload that is JSON and beyond its bounds."""
    for name in _JSON_FIELDS:
        text, field = values.get(name, b""), name.decode()
        if len(text) > _MAX_FIELD_BYTES:
            raise TooLarge(
                f"the job's {field} has {len(text)} bytes, more than the limit of {_MAX_FIELD_BYTES}: shorten it"
            )
        check_containers(field, text, _MAX_FIELD_BYTES)


@dataclass(frozen=True)
class FunctionCall:
    """A job's payload: a dotted name and its arguments. Nothing of it has been imported."""

    name: str
    args: list[Any]
    kwargs: dict[str, Any]


def parse_call(payload: bytes, max_job_bytes: int) -> FunctionCall:
    """Parse a payload's JSON. Raises BadPayload, or TooLarge before it is parsed."""
    check_containers("payload", payload, max_job_bytes)
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
