"""JobRecord: the content of a job's hash when it was claimed."""

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
from worker.store.records.bounds import DEFAULT_MAX_JOB_BYTES, check_json_fields, unpack
from worker.store.records.next_step import Policy

CALLBACKS = {
    "success callback": "success_callback_name",
    "failure callback": "failure_callback_name",
    "stopped callback": "stopped_callback_name",
}
"""The field that names each callback of a job, by the callback's role."""

_CALLBACKS = {role: name.encode() for role, name in CALLBACKS.items()}

DATES = ("created_at", "enqueued_at", "started_at", "ended_at", "last_heartbeat")

_PAYLOAD = (b"data", b"description", b"meta")
"""The fields that nobody reads any more once all requests of a job are in the batch."""

_LIGHT_BYTES = 1 << 11
"""Bytes of a hash up to which a smaller copy of its record saves no memory."""


@dataclass(frozen=True)
class JobRecord:
    """The fields of a job's hash as they stand in Redis, and the values that this worker has read from them.

    hash_bytes: the bytes of the hash that are held, packed. timeout_s: None if the job does not say.
    """

    fields: Mapping[bytes, bytes] = field(default_factory=lambda: MappingProxyType({b"data": b""}))
    max_job_bytes: int = DEFAULT_MAX_JOB_BYTES
    hash_bytes: int = 0
    policy: Policy = field(default_factory=Policy)
    callbacks: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Dotted names by role."""
    webhooks: tuple[Webhook, ...] = ()
    timeout_s: float | None = None
    meta: Any = field(default_factory=dict)

    @property
    def limit_s(self) -> float:
        """The job's timeout; 0 or less for none."""
        return self.timeout_s or Queue.DEFAULT_TIMEOUT

    @property
    def is_followed(self) -> bool:
        """Whether somebody reads the job's text as it grows."""
        return _STREAM in self.fields

    @property
    def is_heavy(self) -> bool:
        """Whether `without_payload` frees more memory than its copy takes."""
        return self.hash_bytes > _LIGHT_BYTES and bool(self.fields[b"data"])

    def payload(self) -> bytes:
        """Unpack the payload's JSON. Raises TooLarge."""
        return unpack(self.fields[b"data"], self.max_job_bytes)

    def without_payload(self) -> JobRecord:
        """Return a copy without the fields that nobody reads any more."""
        fields = {name: value for name, value in self.fields.items() if name not in _PAYLOAD}
        hash_bytes = sum(map(len, fields.values()))
        fields[b"data"] = b""
        return replace(self, fields=MappingProxyType(fields), hash_bytes=hash_bytes, meta={})

    def without_callbacks(self) -> JobRecord:
        """Return a copy for a job whose callbacks may not run here."""
        return replace(self, callbacks=MappingProxyType({}))

    def without_hooks(self) -> JobRecord:
        """Return a copy for a refused job, without callbacks, webhooks and retries."""
        return replace(self.without_callbacks().without_retries(), webhooks=())

    def without_retries(self) -> JobRecord:
        """Return a copy for a job that would fail in the same way each time."""
        return replace(self, policy=replace(self.policy, retries_left=None))


def read_record(
    values: Mapping[bytes, bytes], max_job_bytes: int
) -> tuple[JobRecord, Exception | None]:
    """Read a job's hash as RQ does. The payload stays packed.

    Returns the fields that could be read, and the error of the first one that could not: TooLarge, or RQ's own error.
    """
    parsed: dict[bytes, Any] = {}
    damage = None
    try:
        if b"data" not in values:
            raise ValueError("it has no payload")
        check_json_fields(values)
        for name in values:
            name.decode()
        for name, parse in _PARSERS.items():
            text = values.get(name)
            if text or (text is not None and name in _NEVER_EMPTY):
                parsed[name] = _parsed(name, text, parse)
        _policy(parsed).check()
    except Exception as error:  # noqa: BLE001  # a hash may hold anything
        damage = error
    record = JobRecord(
        fields=MappingProxyType(
            {name: value for name, value in values.items() if name in _HELD_FIELDS}
        ),
        max_job_bytes=max_job_bytes,
        hash_bytes=sum(map(len, values.values())),
        policy=_policy(parsed),
        callbacks=MappingProxyType(
            {role: parsed[name] for role, name in _CALLBACKS.items() if name in parsed}
        ),
        webhooks=parsed.get(b"webhooks", ()),
        timeout_s=parsed.get(b"timeout"),
        meta=parsed.get(b"meta", {}),
    )
    return record, damage


def _parsed(name: bytes, text: bytes, parse: Callable[[bytes], Any]) -> Any:
    """Parse a field. Raises ValueError, with the field's name, if its text is not as expected."""
    try:
        return parse(text)
    except ValueError as error:
        raise ValueError(
            f"{name.decode()} is {text[:40]!r}, expected {_EXPECTED.get(parse, error)}"
        ) from None


def _policy(parsed: Mapping[bytes, Any]) -> Policy:
    return Policy(**{name.decode(): parsed[name] for name in _POLICY if name in parsed})


def _count(text: bytes) -> int:
    """Parse a count that scripts increase. Raises ValueError if it is so large that Redis might refuse to."""
    if not _COUNT.fullmatch(text) or abs(int(text)) > _MAX_COUNT:
        raise ValueError
    return int(text)


def _intervals(text: bytes) -> list[Any] | None:
    intervals = json.loads(text)
    if not isinstance(intervals, list | None):
        raise ValueError
    return intervals


def _meta(text: bytes) -> Any:
    try:
        return JSONSerializer.loads(text)
    except Exception:  # noqa: BLE001  # as RQ does
        return {"unserialized": text}


def _webhooks(text: bytes) -> tuple[Webhook, ...]:
    try:
        return tuple(Webhook.from_dict(data) for data in json.loads(text.decode()))
    except Exception:  # as RQ does
        logging.getLogger("rq.job").warning("failed to deserialize a job's webhooks", exc_info=True)
        return ()


_COUNT = re.compile(rb"-?(0|[1-9][0-9]{0,17})")
_MAX_COUNT = 2**53

_EXPECTED: Mapping[Callable[[bytes], Any], str] = {
    int: "a whole number",
    _count: f"a whole number up to {_MAX_COUNT}",
    _intervals: "a list of seconds",
}

_PARSERS: Mapping[bytes, Callable[[bytes], Any]] = {
    **dict.fromkeys(
        (b"origin", b"worker_name", b"description", b"group_id", b"rate_limit_key"), bytes.decode
    ),
    **dict.fromkeys((b"timeout", b"result_ttl", b"failure_ttl"), int),
    b"status": lambda text: JobStatus(text.decode()),
    **dict.fromkeys(_CALLBACKS.values(), bytes.decode),
    **dict.fromkeys((name.replace(b"_name", b"_timeout") for name in _CALLBACKS.values()), int),
    b"webhooks": _webhooks,
    b"dependency_ids": json.loads,
    b"dependency_id": bytes.decode,
    **dict.fromkeys((b"allow_dependency_failures", b"enqueue_at_front", b"ttl"), int),
    b"meta": _meta,
    **dict.fromkeys(
        (b"number_of_retries", b"retries_left", b"repeats_left", b"rate_limit_concurrency"), _count
    ),
    **dict.fromkeys((b"retry_intervals", b"repeat_intervals"), _intervals),
    b"enqueue_at_front_on_retry": lambda text: bool(int(text)),
    **dict.fromkeys(
        (name.encode() for name in DATES), lambda text: datetime.fromisoformat(text.decode())
    ),
}
"""The fields that RQ's `Job` reads, in its order, without the payload and old versions' fields of a job's end."""

_NEVER_EMPTY = {
    b"enqueue_at_front",
    *(name for name in _PARSERS if name.endswith(b"_callback_timeout")),
}
_POLICY = tuple(policy_field.name.encode() for policy_field in fields(Policy))
_STREAM = STREAM_FIELD.encode()
_HELD_FIELDS = frozenset((b"data", _STREAM, *_PARSERS))
