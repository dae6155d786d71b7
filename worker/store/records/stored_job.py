"""RQ's `Job` of a held job, for user code, which gets the very object that RQ would give it."""

from __future__ import annotations

from contextlib import suppress
from datetime import datetime
from typing import Any

from redis import Redis
from rq.exceptions import DeserializationError
from rq.job import Job, JobStatus
from rq.serializers import JSONSerializer

from worker.store.records.bounds import DEFAULT_MAX_JOB_BYTES, check_payload, unpack
from worker.store.records.claimed_job import ClaimedJob
from worker.store.records.job_record import CALLBACKS, DATES

_HERE: Any = object()
"""Stands in RQ's `_data` for a payload that is packed."""


class StoredJob(Job):
    """RQ's job, whose payload stays as it is in Redis and is unpacked and parsed when somebody asks for it.

    max_bytes: of the payload, unpacked. Whoever asks for a payload beyond its bounds gets TooLarge.
    """

    max_bytes = DEFAULT_MAX_JOB_BYTES
    _packed = b""

    @property
    def data(self) -> bytes:
        """The payload's JSON, as RQ gives it: unpacked anew each time, since it may be large."""
        if self._data is not _HERE:
            return Job.data.fget(self)  # type: ignore[attr-defined, no-any-return]
        return unpack(self._packed, self.max_bytes)

    @data.setter
    def data(self, value: bytes) -> None:
        Job.data.fset(self, value)  # type: ignore[attr-defined]

    def _deserialize_data(self) -> None:
        text = self.data
        check_payload(text, self.max_bytes)
        try:
            self._func_name, self._instance, self._args, self._kwargs = self.serializer.loads(text)
        except Exception as error:
            raise DeserializationError from error

    def restore(self, raw_data: Any) -> None:
        """Read a job's fields as RQ does, but leave the payload packed; RQ's way with dates takes as long as
        all the rest."""
        values: dict[bytes, bytes] = dict(raw_data)
        packed = values.pop(b"data")
        dates = {name: values.pop(name.encode(), None) for name in DATES}
        super().restore({**values, b"data": b""})
        self._data, self._packed = _HERE, packed
        for name, value in dates.items():
            if value:
                setattr(self, name, datetime.fromisoformat(value.decode()))

    def show_started(self, worker_name: str, began_at: datetime) -> None:
        """Note that it runs, in this copy, as RQ does."""
        self._status, self.worker_name = JobStatus.STARTED, worker_name
        self.started_at = self.last_heartbeat = began_at


def job_of(claimed: ClaimedJob, client: Redis, func_name: str | None = None) -> StoredJob:
    """Build the job of a claim, less what was taken from it since; as far as its hash could be read.

    func_name: what it calls, where that is known; its payload may be dropped then.
    """
    record = claimed.record
    job = StoredJob(connection=client)
    job.serializer = JSONSerializer
    job.max_bytes = record.max_job_bytes
    job._id = claimed.job_id  # unchecked: an id that RQ's client would refuse is still a job to end
    with suppress(Exception):  # what is damaged was told when the record was read
        job.restore(record.fields)
    if func_name is not None:
        job._func_name = func_name
    for role, field in CALLBACKS.items():
        setattr(job, f"_{field}", record.callbacks.get(role))
    job.webhooks = list(record.webhooks)
    record.policy.put_on(job)
    return job
