"""A job's hash as RQ's `Job`, read within bounds: it may have been made to break its reader."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from rq.exceptions import DeserializationError
from rq.job import Job, JobStatus
from rq.queue import Queue

from jobs.common.stored import unpacked
from worker.errors import TooLarge

DEFAULT_MAX_JOB_BYTES = 4 << 20
DEFAULT_MAX_HELD_BYTES = 64 << 20
"""Of the jobs of one lane, see payload_budget.py."""

MAX_HASH_FIELDS = 1000
"""RQ writes about 40, and user code may keep some of its own there."""

BYTES_PER_CONTAINER = 40
"""A payload may hold one list or object for so many of the bytes that it may have. Parsed, the smallest ones
take 27 times their text in memory, and ten times as long as other values."""

_MAX_FIELD_BYTES = 1 << 20
"""Of a field beside the payload that is JSON: `meta`, and what says how a job ends."""

_JSON_FIELDS = ("meta", "webhooks", "dependency_ids", "retry_intervals", "repeat_intervals")
_OLD_FIELDS = ("result", "exc_info")
"""Where old versions of RQ kept the end of a job: its `Job` asks rq:results first."""

_DROPPED = (b"data", b"description", b"meta", *(name.encode() for name in _OLD_FIELDS))
"""What `drop_payload` lets go of, or was never held."""

_DATES = ("created_at", "enqueued_at", "started_at", "ended_at", "last_heartbeat")

_COUNTS = ("retries_left", "number_of_retries", "repeats_left", "worker_deaths")
_COUNT = re.compile(rb"-?(0|[1-9][0-9]{0,17})")
_MAX_COUNT = 2**53
"""Scripts add to these fields, and Redis refuses a sum it cannot write, also in the middle of a script."""

_WHOLE_NUMBERS = ("timeout", "result_ttl", "failure_ttl", "ttl")
"""Seconds, which RQ's producers write as whole numbers; for others its reader raises what names no field."""

_HERE: Any = object()
"""Stands in RQ's `_data` for a payload that is packed."""


def max_hash_bytes(max_job_bytes: int) -> int:
    """The memory that a job's hash may take in Redis: the payload, the description, which repeats it, and
    the other fields."""
    return 2 * max_job_bytes + _MAX_FIELD_BYTES


class HeldJob(Job):
    """RQ's job, whose payload stays as it is in Redis and is unpacked and parsed when somebody asks for it.

    max_bytes: of the payload, unpacked. Whoever asks for a payload beyond its bounds gets TooLarge.
    """

    max_bytes = DEFAULT_MAX_JOB_BYTES
    hash_bytes = 0
    """What it holds of the hash, packed."""
    payload_bytes = 0
    """Of the payload when it was unpacked last; 0 before."""
    _packed = b""
    _meta_bytes = _rest_bytes = 0

    @property
    def data(self) -> bytes:
        """The payload's JSON, as RQ gives it: unpacked anew each time, since it may be large."""
        if self._data is not _HERE:
            return Job.data.fget(self)  # type: ignore[attr-defined, no-any-return]
        text = unpack(self._packed, self.max_bytes)
        self.payload_bytes = len(text)
        return text

    @data.setter
    def data(self, value: bytes) -> None:
        Job.data.fset(self, value)  # type: ignore[attr-defined]

    @property
    def limit_s(self) -> float:
        """The job's timeout; 0 or less for none."""
        return self.timeout or Queue.DEFAULT_TIMEOUT

    def show_started(self, worker_name: str, began_at: datetime) -> None:
        """Note that it runs, in this copy, which its own code gets, as RQ does."""
        self._status, self.worker_name = JobStatus.STARTED, worker_name
        self.started_at = self.last_heartbeat = began_at

    def drop_payload(self, keeps_meta: bool) -> None:
        """Let go of what nobody asks for any more: payload, arguments and description, perhaps `meta`."""
        self.hash_bytes, meta = self._rest_bytes, self.meta
        self._packed, self._args, self._kwargs, self.description, self.meta = b"", [], {}, None, {}
        if keeps_meta:
            self.hash_bytes, self.meta = self.hash_bytes + self._meta_bytes, meta

    def _deserialize_data(self) -> None:
        text = self.data
        check_containers("payload", text, self.max_bytes // BYTES_PER_CONTAINER)
        try:
            self._func_name, self._instance, self._args, self._kwargs = self.serializer.loads(text)
        except Exception as error:
            raise DeserializationError from error

    def restore(self, raw_data: Any) -> None:
        """Read a job's hash as RQ does, but for the payload, and for the dates: RQ's way takes as long as
        all the rest. Raises TooLarge, or what RQ raises for a field that is damaged."""
        values: dict[bytes, bytes] = dict(raw_data)
        if (packed := values.get(b"data")) is None:
            raise ValueError("it has no payload")
        self.hash_bytes = sum(map(len, values.values()))
        self._meta_bytes = len(values.get(b"meta", b""))
        self._rest_bytes = sum(len(value) for name, value in values.items() if name not in _DROPPED)
        for name in _JSON_FIELDS:
            _check_field(name, values.get(name.encode(), b""))
        for name in _OLD_FIELDS:
            values.pop(name.encode(), None)
        for name in _WHOLE_NUMBERS:
            check_whole(name, values.get(name.encode()))
        dates = {name: values.pop(name.encode(), None) for name in _DATES}
        super().restore({**values, b"data": b""})
        self._data, self._packed = _HERE, packed
        for name, value in dates.items():
            if value:
                setattr(self, name, datetime.fromisoformat(value.decode()))


def unpack(packed: bytes, most: int) -> bytes:
    """Unpack a payload as RQ does. Raises TooLarge beyond `most` bytes, without unpacking more."""
    text = unpacked(packed, most)
    if text is None:
        raise TooLarge(
            f"the payload has more than the limit of {most} bytes: split the job, score a Parquet file, "
            "or raise TOKENMILL_MAX_JOB_BYTES"
        )
    return text


def check_containers(what: str, text: bytes, most: int) -> None:
    """Raise TooLarge for JSON of more than `most` lists and objects, before it is parsed."""
    if text.count(b"[") + text.count(b"{") <= most:
        return
    # Those in strings are none. Without escapes, quotes alternate between begin and end; two of them next to
    # each other can go, whatever they are.
    marks = text.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _NO_MARKS).replace(b'""', b"")
    found = sum(map(len, marks.split(b'"')[::2]))
    if found > most:
        raise TooLarge(
            f"the {what} holds {found} lists and objects, more than the limit of {most}: split the job, "
            "score a Parquet file, or raise TOKENMILL_MAX_JOB_BYTES"
        )


_NO_MARKS = bytes(set(range(256)) - set(b'"[{'))


def _check_field(name: str, text: bytes) -> None:
    if len(text) > _MAX_FIELD_BYTES:
        raise TooLarge(
            f"the job's {name} has {len(text)} bytes, more than the limit of {_MAX_FIELD_BYTES}: shorten it"
        )
    check_containers(name, text, _MAX_FIELD_BYTES // BYTES_PER_CONTAINER)


def check_whole(name: str, text: bytes | None) -> None:
    """Raise ValueError for seconds that are no whole number; an empty field is none."""
    if text:
        try:
            int(text)
        except ValueError:
            raise ValueError(f"{name} is {text[:40]!r}, expected whole seconds") from None


def check_counts(values: Mapping[bytes, bytes]) -> None:
    """Raise ValueError for a count that a script would stumble over when the job ends."""
    for name in _COUNTS:
        text = values.get(name.encode())
        if text and not (_COUNT.fullmatch(text) and abs(int(text)) <= _MAX_COUNT):
            raise ValueError(f"{name} is {text[:40]!r}, expected a whole number up to {_MAX_COUNT}")
