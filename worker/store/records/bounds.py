"""The limits of a job's hash, and the parsing of its function call within them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rq.serializers import JSONSerializer

from jobs.common.stored import unpacked
from worker.errors import BadPayload, TooLarge

DEFAULT_MAX_JOB_BYTES = 4 << 20
"""The most bytes of a job's payload, unpacked."""

DEFAULT_MAX_HELD_BYTES = 64 << 20
"""The most bytes of hashes and payloads that the open jobs of a lane hold, see packing.py."""

MAX_HASH_FIELDS = 1000
"""The most fields of a job's hash. RQ writes about 40, and user code may add some."""

BYTES_PER_CONTAINER = 40
"""A payload may hold one list or object for each 40 bytes of its limit. The smallest lists take 27 times their text in
memory when they are parsed, and ten times as long as other values."""

_MAX_FIELD_BYTES = 1 << 20
"""The most bytes of each other field that is JSON, such as `meta`."""

_JSON_FIELDS = (b"meta", b"webhooks", b"dependency_ids", b"retry_intervals", b"repeat_intervals")


def max_hash_bytes(max_job_bytes: int) -> int:
    """Return the most bytes of a job's hash in Redis: its payload, the description that repeats it, other fields."""
    return 2 * max_job_bytes + _MAX_FIELD_BYTES


def unpack(packed: bytes, max_bytes: int) -> bytes:
    """Unpack a payload as RQ does. Raises TooLarge if it has more than `max_bytes` bytes, without unpacking further."""
    text = unpacked(packed, max_bytes)
    if text is None:
        raise TooLarge(
            f"the payload has more than the limit of {max_bytes} bytes: split the job, score a Parquet file, "
            "or raise TOKENMILL_MAX_JOB_BYTES"
        )
    return text


def check_containers(field_name: str, text: bytes, max_bytes: int) -> None:
    """Raise TooLarge if JSON holds more lists and objects than `max_bytes` bytes may hold. It is not parsed.

    field_name: names the text in the error's message.
    """
    max_containers = max_bytes // BYTES_PER_CONTAINER
    if text.count(b"[") + text.count(b"{") <= max_containers:
        return
    # Brackets in strings do not count. Without escapes, quotes alternate between begin and end. Two of them next to
    # each other enclose nothing, or nothing between two strings, and can go.
    marks = (
        text.replace(b"\\\\", b"")
        .replace(b'\\"', b"")
        .translate(None, _NO_MARKS)
        .replace(b'""', b"")
    )
    num_containers = sum(map(len, marks.split(b'"')[::2]))
    if num_containers > max_containers:
        raise TooLarge(
            f"the {field_name} holds {num_containers} lists and objects, more than the limit of {max_containers}: "
            "split the job, score a Parquet file, or raise TOKENMILL_MAX_JOB_BYTES"
        )


_NO_MARKS = bytes(set(range(256)) - set(b'"[{'))


def check_json_fields(values: Mapping[bytes, bytes]) -> None:
    """Raise TooLarge if a JSON field other than the payload is beyond its bounds."""
    for name in _JSON_FIELDS:
        text = values.get(name, b"")
        field_name = name.decode()
        if len(text) > _MAX_FIELD_BYTES:
            raise TooLarge(
                f"the job's {field_name} has {len(text)} bytes, more than the limit of {_MAX_FIELD_BYTES}: shorten it"
            )
        check_containers(field_name, text, _MAX_FIELD_BYTES)


@dataclass(frozen=True)
class FunctionCall:
    """A job's payload: a function's dotted name and its arguments. Nothing has been imported for it."""

    name: str
    args: list[Any]
    kwargs: dict[str, Any]


def parse_call(payload: bytes, max_job_bytes: int) -> FunctionCall:
    """Parse a payload's JSON. Raises BadPayload. Raises TooLarge before anything is parsed."""
    check_containers("payload", payload, max_job_bytes)
    try:
        name, instance, args, kwargs = JSONSerializer.loads(payload)
    except Exception as error:
        raise BadPayload(
            "the payload is not JSON: enqueue with the JSON serializer (rq enqueue -S json, or "
            'Queue(..., serializer="json")); other payloads are never loaded'
        ) from error
    if not (isinstance(name, str) and isinstance(args, list) and isinstance(kwargs, dict)):
        raise BadPayload(
            "the payload is JSON, but not [function name, null, [arguments], {keywords}]"
        )
    if instance is not None:
        raise BadPayload("the payload calls a method of an object; only plain functions run here")
    return FunctionCall(name, args, kwargs)
