"""What a job's hash held when the job was claimed: a record that nobody changes."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from types import MappingProxyType
from typing import Any

from rq.job import JobStatus
from rq.queue import Queue
from rq.serializers import JSONSerializer
from rq.utils import parse_timeout
from rq.webhook import Webhook

from worker.store.records.bounds import DEFAULT_MAX_JOB_BYTES, check_counts, check_json_fields, check_seconds, unpack
from worker.store.records.next_step import Policy

CALLBACKS = {
    "success callback": "success_callback_name",
    "failure callback": "failure_callback_name",
    "stopped callback": "stopped_callback_name",
}
"""Role of each callback of a job -> the field that names it."""

_TEXTS = ("origin", "worker_name", "description", "group_id", "rate_limit_key", *CALLBACKS.values())
DATES = ("created_at", "enqueued_at", "started_at", "ended_at", "last_heartbeat")
_POLICY_NUMBERS = ("number_of_retries", "retries_left", "repeats_left")
_OTHERS = (
    *("data", "status", "timeout", "result_ttl", "failure_ttl", "ttl", "meta", "webhooks"),
    *("dependency_ids", "dependency_id", "allow_dependency_failures", "enqueue_at_front"),
    *("enqueue_at_front_on_retry", "retry_intervals", "repeat_intervals", "rate_limit_concurrency"),
    *(f"{role}_callback_timeout" for role in ("success", "failure", "stopped")),
)
_KEPT = frozenset(name.encode() for name in (*_TEXTS, *DATES, *_POLICY_NUMBERS, *_OTHERS))
"""Fields that RQ's `Job` reads, but those in which old versions kept the end of a job: it asks rq:results
first."""

_CALLBACK_FIELDS = tuple(
    (role, name.encode(), name.replace("_name", "_timeout").encode()) for role, name in CALLBACKS.items()
)
"""Role of each callback -> the fields of its name and its timeout."""

_DATE_FIELDS = tuple(name.encode() for name in DATES)

_PAYLOAD = (b"data", b"description", b"meta")
"""What nobody asks for any more once all of a job is in the batch, perhaps but `meta`."""

_LIGHT_BYTES = 1 << 11
"""A record of no more takes about as much for itself."""

_rq_log = logging.getLogger("rq.job")


@dataclass(frozen=True)
class JobRecord:
    """Its fields within bounds, as they stand in Redis, and what the worker reads of them.

    hash_bytes: what it holds of the hash, packed. timeout_s: None where the job does not say.
    """

    fields: Mapping[bytes, bytes] = field(default_factory=lambda: MappingProxyType({b"data": b""}))
    max_job_bytes: int = DEFAULT_MAX_JOB_BYTES
    hash_bytes: int = 0
    policy: Policy = field(default_factory=Policy)
    callbacks: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Role -> dotted name."""
    webhooks: tuple[Webhook, ...] = ()
    timeout_s: float | None = None
    meta: Any = field(default_factory=dict)

    @property
    def limit_s(self) -> float:
        """The job's timeout; 0 or less for none."""
        return self.timeout_s or Queue.DEFAULT_TIMEOUT

    @property
    def is_heavy(self) -> bool:
        """Whether it holds a payload, and `without_payload` frees more than the copy of the rest takes."""
        return self.hash_bytes > _LIGHT_BYTES and bool(self.fields[b"data"])

    def payload(self) -> bytes:
        """Unpack the payload's JSON. Raises TooLarge."""
        return unpack(self.fields[b"data"], self.max_job_bytes)

    def without_payload(self, keeps_meta: bool) -> JobRecord:
        """Less what nobody asks for any more."""
        kept = dict(self.fields)
        for name in _PAYLOAD:
            if name != b"meta" or not keeps_meta:
                kept.pop(name, None)
        hash_bytes = sum(map(len, kept.values()))
        kept[b"data"] = b""
        return replace(self, fields=MappingProxyType(kept), hash_bytes=hash_bytes, meta=self.meta if keeps_meta else {})

    def without_callbacks(self) -> JobRecord:
        """Of a job whose callbacks may not run here."""
        return replace(self, callbacks=MappingProxyType({}))

    def without_hooks(self) -> JobRecord:
        """Of a job that is refused: none of its callbacks and webhooks runs, and it is not retried."""
        return replace(self.without_callbacks().without_retries(), webhooks=())

    def without_retries(self) -> JobRecord:
        """Of a job that would fail alike each time."""
        return replace(self, policy=replace(self.policy, retries_left=None))


def read_record(job_id: str, values: Mapping[bytes, bytes], max_job_bytes: int) -> tuple[JobRecord, Exception | None]:
    """Read a job's hash as RQ does, but for the payload, which stays packed.

    Returns what could be read, and what reading the rest raised: TooLarge, or what RQ's reader raises for a
    field that is damaged.
    """
    reader = _Reader(job_id, values)
    damage = None
    try:
        reader.read()
        policy = Policy(**reader.policy)
        policy.check()
    except Exception as error:  # noqa: BLE001  # a hash may hold anything
        damage, policy = error, Policy(**reader.policy)
    record = JobRecord(
        fields=MappingProxyType({name: value for name, value in values.items() if name in _KEPT}),
        max_job_bytes=max_job_bytes,
        hash_bytes=sum(map(len, values.values())),
        policy=policy,
        callbacks=MappingProxyType(reader.callbacks),
        webhooks=tuple(reader.webhooks),
        timeout_s=reader.timeout_s,
        meta=reader.meta,
    )
    return record, damage


class _Reader:
    """Reads in RQ's order, so that what was read before a damaged field counts."""

    def __init__(self, job_id: str, values: Mapping[bytes, bytes]) -> None:
        self._job_id, self._values = job_id, values
        self.policy: dict[str, Any] = {}
        self.callbacks: dict[str, str] = {}
        self.webhooks: list[Webhook] = []
        self.timeout_s: float | None = None
        self.meta: Any = {}

    def _get(self, name: bytes) -> bytes | None:
        """A field's bytes, None where it is missing or empty."""
        return self._values.get(name) or None

    def read(self) -> None:
        """Read everything. Raises for the first field that is damaged."""
        if b"data" not in self._values:
            raise ValueError("it has no payload")
        check_json_fields(self._values)
        check_seconds(self._values)
        for field_name in self._values:
            field_name.decode()
        self._check_texts()
        self._read_times()
        if status := self._get(b"status"):
            JobStatus(status.decode())
        self._read_hooks()
        self._check_dependencies()
        self._read_meta()
        self._read_policy()
        for name in _DATE_FIELDS:
            if value := self._get(name):
                datetime.fromisoformat(value.decode())
        check_counts(self._values)

    def _check_texts(self) -> None:
        for name in (b"origin", b"worker_name", b"description", b"group_id", b"rate_limit_key"):
            if value := self._get(name):
                value.decode()

    def _read_times(self) -> None:
        timeout: Any = self._get(b"timeout")
        self.timeout_s = parse_timeout(timeout) if timeout else None
        for name in (b"result_ttl", b"failure_ttl"):
            if value := self._get(name):
                self.policy[name.decode()] = int(value)

    def _read_hooks(self) -> None:
        for role, name, timeout_name in _CALLBACK_FIELDS:
            if value := self._get(name):
                self.callbacks[role] = value.decode()
            if timeout_name in self._values:
                int(self._values[timeout_name])
        if webhooks := self._get(b"webhooks"):
            try:
                self.webhooks = [Webhook.from_dict(data) for data in json.loads(webhooks.decode())]
            except Exception:  # noqa: BLE001  # as RQ does
                _rq_log.warning("Job %s: failed to deserialize webhooks", self._job_id, exc_info=True)

    def _check_dependencies(self) -> None:
        if ids := self._get(b"dependency_ids"):
            json.loads(ids.decode())
        elif dependency_id := self._get(b"dependency_id"):
            dependency_id.decode()
        if flag := self._get(b"allow_dependency_failures"):
            int(flag)
        if b"enqueue_at_front" in self._values:
            int(self._values[b"enqueue_at_front"])
        if ttl := self._get(b"ttl"):
            int(ttl)

    def _read_meta(self) -> None:
        if meta := self._get(b"meta"):
            try:
                self.meta = JSONSerializer.loads(meta)
            except Exception:  # noqa: BLE001  # as RQ does
                self.meta = {"unserialized": meta}

    def _read_policy(self) -> None:
        for name in (b"number_of_retries", b"retries_left"):
            if value := self._get(name):
                self.policy[name.decode()] = int(value)
        if intervals := self._get(b"retry_intervals"):
            self.policy["retry_intervals"] = json.loads(intervals.decode())
        if flag := self._get(b"enqueue_at_front_on_retry"):
            self.policy["enqueue_at_front_on_retry"] = bool(int(flag))
        if left := self._get(b"repeats_left"):
            self.policy["repeats_left"] = int(left)
        if intervals := self._get(b"repeat_intervals"):
            self.policy["repeat_intervals"] = json.loads(intervals.decode())
