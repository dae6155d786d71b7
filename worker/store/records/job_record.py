"""JobRecord: the content of a job's hash when the job was claimed. FunctionCall: the job's payload.

Both have limits, which are checked here.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from types import MappingProxyType
from typing import Any

from rq.job import JobStatus
from rq.queue import Queue
from rq.serializers import JSONSerializer
from rq.webhook import Webhook

from jobs.common.keys import STREAM_FIELD
from jobs.common.stored import unpack_at_most
from worker.errors import BadPayload, TooLarge
from worker.store.records.next_step import Policy

DEFAULT_MAX_JOB_BYTES = 4 << 20
"""The most bytes of a job's payload, unpacked."""

DEFAULT_MAX_HELD_BYTES = 64 << 20
"""The most bytes of hashes and unpacked payloads that the open jobs of a lane may hold, see packing.py."""

MAX_HASH_FIELDS = 1000
"""The most fields of a job's hash. RQ writes about 40, and user code may add some."""

BYTES_PER_CONTAINER = 40
"""A payload may hold one list or object for each 40 bytes of its limit. The smallest lists take 27 times the memory of
their text once they are parsed, and parsing them takes ten times as long as parsing other values."""

_MAX_FIELD_BYTES = 1 << 20
"""The most bytes of each JSON field other than the payload, such as `meta`."""

_JSON_FIELDS = (b"meta", b"webhooks", b"dependency_ids", b"retry_intervals", b"repeat_intervals")

CALLBACKS = {
    "success callback": "success_callback_name",
    "failure callback": "failure_callback_name",
    "stopped callback": "stopped_callback_name",
}
"""The field that names each callback of a job, by the callback's role."""

_CALLBACKS = {role: name.encode() for role, name in CALLBACKS.items()}

DATES = ("created_at", "enqueued_at", "started_at", "ended_at", "last_heartbeat")

_PAYLOAD_FIELDS = (b"data", b"description", b"meta")
"""The fields that nobody reads any more once all requests of a job are in the batch."""

_LIGHT_BYTES = 1 << 11
"""If a hash has at most this many bytes, a copy of its record without the payload saves no memory."""


@dataclass(frozen=True)
class JobRecord:
    """The fields of a job's hash as they stand in Redis, and the values that this worker has read from them.

    hash_bytes: how many bytes the hash's values have, with the payload packed. After `without_payload`, only the
    remaining fields are counted.
    timeout_s: the job's timeout; None if the job has none of its own.
    """

    fields: Mapping[bytes, bytes] = field(default_factory=lambda: MappingProxyType({b"data": b""}))
    max_job_bytes: int = DEFAULT_MAX_JOB_BYTES
    hash_bytes: int = 0
    policy: Policy = field(default_factory=Policy)
    callbacks: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """The dotted names of the callback functions, by role."""
    webhooks: tuple[Webhook, ...] = ()
    timeout_s: float | None = None
    meta: Any = field(default_factory=dict)

    @property
    def limit_s(self) -> float:
        """The job's timeout, or RQ's default if the job has none of its own; negative for no limit."""
        return self.timeout_s or Queue.DEFAULT_TIMEOUT

    @property
    def is_followed(self) -> bool:
        """Whether a client reads the job's text as it grows."""
        return _STREAM in self.fields

    @property
    def is_heavy(self) -> bool:
        """Whether `without_payload` saves memory. For a small hash, the copy saves none."""
        return self.hash_bytes > _LIGHT_BYTES and bool(self.fields[b"data"])

    def payload(self) -> bytes:
        """Unpack the payload's JSON. Raises TooLarge."""
        return unpack_payload(self.fields[b"data"], self.max_job_bytes)

    def without_payload(self) -> JobRecord:
        """Return a copy without the payload, for a job whose requests are all in the batch."""
        fields = {name: value for name, value in self.fields.items() if name not in _PAYLOAD_FIELDS}
        hash_bytes = sum(map(len, fields.values()))
        fields[b"data"] = b""
        return replace(self, fields=MappingProxyType(fields), hash_bytes=hash_bytes, meta={})

    def without_callbacks(self) -> JobRecord:
        """Return a copy without callbacks, for a job whose callbacks may not run in this worker."""
        return replace(self, callbacks=MappingProxyType({}))

    def without_hooks(self) -> JobRecord:
        """Return a copy for a refused job, without callbacks, webhooks and retries."""
        return replace(self.without_callbacks().without_retries(), webhooks=())

    def without_retries(self) -> JobRecord:
        """Return a copy without retries, for a job that would fail in the same way each time."""
        return replace(self, policy=replace(self.policy, retries_left=None))


def read_record(
    values: Mapping[bytes, bytes], max_job_bytes: int
) -> tuple[JobRecord, Exception | None]:
    """Read a job's hash as RQ does. The payload stays packed.

    Returns the record with the fields that could be read, and the error of the first field that could not: TooLarge or
    RQ's own error. The error is None if all could be read.
    """
    parsed: dict[bytes, Any] = {}
    damage = None
    try:
        if b"data" not in values:
            raise ValueError("it has no payload")
        check_json_fields(values)
        for name in values:
            name.decode()  # raises for a name that RQ could not read
        _parse_fields(values, parsed)
        _policy(parsed).check()
    except Exception as error:  # noqa: BLE001  # a hash may hold anything
        damage = error

    kept_fields = {name: value for name, value in values.items() if name in _KEPT_FIELDS}
    callbacks = {role: parsed[name] for role, name in _CALLBACKS.items() if name in parsed}
    record = JobRecord(
        fields=MappingProxyType(kept_fields),
        max_job_bytes=max_job_bytes,
        hash_bytes=sum(map(len, values.values())),
        policy=_policy(parsed),
        callbacks=MappingProxyType(callbacks),
        webhooks=parsed.get(b"webhooks", ()),
        timeout_s=parsed.get(b"timeout"),
        meta=parsed.get(b"meta", {}),
    )
    return record, damage


def _parse_fields(values: Mapping[bytes, bytes], parsed: dict[bytes, Any]) -> None:
    """Parse a hash's fields into `parsed`, up to the first field that cannot be read. Raises that field's error."""
    for name, parse in _PARSERS.items():
        text = values.get(name)
        if text is None:
            continue
        if text == b"" and name not in _NEVER_EMPTY:
            continue  # RQ skips such a field too
        parsed[name] = _parse_field(name, text, parse)


def _parse_field(name: bytes, text: bytes, parse: Callable[[bytes], Any]) -> Any:
    """Parse a field. Raises ValueError, with the field's name, if its text is not as expected."""
    try:
        return parse(text)
    except ValueError as error:
        raise ValueError(f"{name.decode()} is {text[:40]!r}: {error}") from None


def _policy(parsed: Mapping[bytes, Any]) -> Policy:
    """Return the fields that decide what becomes of the job after its end."""
    values = {}
    for name in _POLICY_FIELDS:
        if name in parsed:
            values[name.decode()] = parsed[name]
    return Policy(**values)


def _whole_number(text: bytes) -> int:
    """Parse a whole number. Raises ValueError."""
    try:
        return int(text)
    except ValueError:
        raise ValueError("expected a whole number") from None


def _count(text: bytes) -> int:
    """Parse a count that scripts increase. Raises ValueError if Redis could not increase it further."""
    if not _COUNT.fullmatch(text) or abs(int(text)) > _MAX_COUNT:
        raise ValueError(f"expected a whole number up to {_MAX_COUNT}")
    return int(text)


def _intervals(text: bytes) -> list[Any] | None:
    """Parse a list of intervals in seconds, or null. Raises ValueError."""
    intervals = json.loads(text)
    if not isinstance(intervals, list | None):
        raise ValueError("expected a list of seconds")
    return intervals


def _meta(text: bytes) -> Any:
    """Parse the job's meta."""
    try:
        return JSONSerializer.loads(text)
    except Exception:  # noqa: BLE001  # as RQ does
        return {"unserialized": text}


def _webhooks(text: bytes) -> tuple[Webhook, ...]:
    """Parse the job's webhooks. If one of them cannot be read, return none at all, as RQ does."""
    try:
        return tuple(Webhook.from_dict(data) for data in json.loads(text.decode()))
    except Exception:  # as RQ does
        logging.getLogger("rq.job").warning("failed to deserialize a job's webhooks", exc_info=True)
        return ()


_COUNT = re.compile(rb"-?(0|[1-9][0-9]{0,17})")
_MAX_COUNT = 2**53


_PARSERS: Mapping[bytes, Callable[[bytes], Any]] = {
    **dict.fromkeys(
        (b"origin", b"worker_name", b"description", b"group_id", b"rate_limit_key"), bytes.decode
    ),
    **dict.fromkeys((b"timeout", b"result_ttl", b"failure_ttl"), _whole_number),
    b"status": lambda text: JobStatus(text.decode()),
    **dict.fromkeys(_CALLBACKS.values(), bytes.decode),
    **dict.fromkeys(
        (name.replace(b"_name", b"_timeout") for name in _CALLBACKS.values()), _whole_number
    ),
    b"webhooks": _webhooks,
    b"dependency_ids": json.loads,
    b"dependency_id": bytes.decode,
    **dict.fromkeys((b"allow_dependency_failures", b"enqueue_at_front", b"ttl"), _whole_number),
    b"meta": _meta,
    **dict.fromkeys(
        (b"number_of_retries", b"retries_left", b"repeats_left", b"rate_limit_concurrency"), _count
    ),
    **dict.fromkeys((b"retry_intervals", b"repeat_intervals"), _intervals),
    b"enqueue_at_front_on_retry": lambda text: bool(_whole_number(text)),
    **dict.fromkeys(
        (name.encode() for name in DATES), lambda text: datetime.fromisoformat(text.decode())
    ),
}
"""How to parse the fields that RQ's `Job` reads, in RQ's order. Two kinds of fields are left out: the payload, and the
fields in which old versions of RQ kept a job's end."""

_NEVER_EMPTY = {
    b"enqueue_at_front",
    *(name for name in _PARSERS if name.endswith(b"_callback_timeout")),
}
"""RQ parses these fields even if they are empty, and fails then. RQ skips other empty fields."""

_POLICY_FIELDS = tuple(policy_field.name.encode() for policy_field in fields(Policy))
_STREAM = STREAM_FIELD.encode()
_KEPT_FIELDS = frozenset((b"data", _STREAM, *_PARSERS))


def max_hash_bytes(max_job_bytes: int) -> int:
    """Return the most bytes of a job's hash in Redis: a payload, a description that repeats it, and other fields."""
    return 2 * max_job_bytes + _MAX_FIELD_BYTES


def unpack_payload(packed: bytes, max_bytes: int) -> bytes:
    """Unpack a payload as RQ does. Raises TooLarge as soon as there are more than `max_bytes` bytes."""
    text = unpack_at_most(packed, max_bytes)
    if text is None:
        raise TooLarge(
            f"the payload has more than the limit of {max_bytes} bytes: split the job, score a Parquet file, "
            "or raise TOKENMILL_MAX_JOB_BYTES"
        )
    return text


def check_containers(field_name: str, text: bytes, max_bytes: int) -> None:
    """Raise TooLarge if a JSON text holds too many lists and objects. They are counted without parsing the text.

    field_name: names the text in the error's message. max_bytes: the limit of the text's bytes, from which the limit of
    its lists and objects follows.
    """
    max_containers = max_bytes // BYTES_PER_CONTAINER
    if text.count(b"[") + text.count(b"{") <= max_containers:
        return
    # Brackets in strings do not count. Without escaped characters, each quote begins or ends a string.
    unescaped = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    quotes_and_brackets = unescaped.translate(None, _OTHER_BYTES)
    # A string without brackets is now empty. Most strings are, so dropping them leaves less to split.
    without_empty_strings = quotes_and_brackets.replace(b'""', b"")
    # Quotes split the text into pieces. The first piece, the third and so on are outside strings.
    pieces_outside_strings = without_empty_strings.split(b'"')[::2]
    # Only opening brackets are left in these pieces. Each bracket is a list or an object.
    num_containers = sum(map(len, pieces_outside_strings))
    if num_containers > max_containers:
        raise TooLarge(
            f"the {field_name} holds {num_containers} lists and objects, more than the limit of {max_containers}: "
            "split the job, score a Parquet file, or raise TOKENMILL_MAX_JOB_BYTES"
        )


_OTHER_BYTES = bytes(set(range(256)) - set(b'"[{'))
"""All bytes but quotes and opening brackets."""


def check_json_fields(values: Mapping[bytes, bytes]) -> None:
    """Raise TooLarge if a JSON field other than the payload is too long, or holds too many lists and objects."""
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
    """A job's payload: a function's dotted name and its arguments. No module has been imported for it yet."""

    name: str
    args: list[Any]
    kwargs: dict[str, Any]


def parse_call(payload: bytes, max_job_bytes: int) -> FunctionCall:
    """Parse a payload's JSON. Raises BadPayload, or TooLarge before anything is parsed."""
    check_containers("payload", payload, max_job_bytes)
    try:
        name, instance, args, kwargs = JSONSerializer.loads(payload)
    except Exception as error:
        raise BadPayload(
            "the payload is not JSON: enqueue with the JSON serializer (rq enqueue -S json, or "
            'Queue(..., serializer="json")); other payloads are never loaded'
        ) from error
    is_call = isinstance(name, str) and isinstance(args, list) and isinstance(kwargs, dict)
    if not is_call:
        raise BadPayload(
            "the payload is JSON, but not [function name, null, [arguments], {keywords}]"
        )
    if instance is not None:
        raise BadPayload("the payload calls a method of an object; only plain functions run here")
    return FunctionCall(name, args, kwargs)
