"""A held job as RQ's `Job`, for the user's code, and its time limit."""

import threading
from contextlib import suppress
from datetime import datetime
from typing import Any

from redis import Redis
from rq.exceptions import DeserializationError
from rq.job import Job, JobStatus
from rq.serializers import JSONSerializer
from rq.timeouts import JobTimeoutException, TimerDeathPenalty

from worker.store.records.bounds import DEFAULT_MAX_JOB_BYTES, check_containers, unpack
from worker.store.records.claimed_job import ClaimedJob
from worker.store.records.job_record import CALLBACKS, DATES
from worker.threads.interrupts import as_class, current_call

_HERE: Any = object()
"""Stands in RQ's `_data` for a payload that is packed."""


__all__ = ["JobTimeoutException", "StoredJob", "ThreadDeathPenalty", "job_of", "timeout_error"]


class StoredJob(Job):
    """RQ's job, whose payload is unpacked when asked for: TooLarge beyond max_bytes."""

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
        check_containers("payload", text, self.max_bytes)
        try:
            self._func_name, self._instance, self._args, self._kwargs = self.serializer.loads(text)
        except Exception as error:
            raise DeserializationError from error

    def restore(self, raw_data: Any) -> None:
        """Read a job's fields as RQ does, but faster with dates, and leave the payload packed."""
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
    """Build the readable part of a claim's job, without later removals.

    func_name: its function, if known; the payload may be dropped then.
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
    for role, name in CALLBACKS.items():
        setattr(job, f"_{name}", record.callbacks.get(role))
    job.webhooks = list(record.webhooks)
    record.policy.put_on(job)
    return job


class ThreadDeathPenalty(TimerDeathPenalty):
    """RQ's time limit for callbacks, for the threads of a pool.

    RQ's own writes its message into a class that threads share, and its timer may hit the thread's next work.
    """

    def __init__(self, timeout: float, exception: type[Exception] = JobTimeoutException, **kwargs: Any) -> None:
        super().__init__(timeout, type(exception.__name__, (exception,), {}), **kwargs)
        self._call, self._lock, self._is_over = current_call(), threading.Lock(), False

    def handle_death_penalty(self) -> None:
        """Interrupt the call, unless it is over; called by the timer's thread."""
        with self._lock:
            if self._call is not None and not self._is_over:
                self._call.interrupt(self._exception)

    def cancel_death_penalty(self) -> None:
        """Let the rest of the call run. RQ's caller swallows a limit's error here."""
        try:
            with self._lock:
                self._is_over = True
            super().cancel_death_penalty()
        finally:
            if self._call is not None:
                self._call.heeded()


def timeout_error(timeout_s: float) -> type[Exception]:
    """Return the error of a job over its timeout."""
    return as_class(JobTimeoutException(f"Task exceeded maximum timeout value ({timeout_s:g} seconds)"))
