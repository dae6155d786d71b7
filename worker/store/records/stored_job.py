"""StoredJob: a held job in the form of RQ's `Job`, for user code. ThreadDeathPenalty: a time limit for user code."""

import threading
from contextlib import suppress
from datetime import datetime
from typing import Any

from redis import Redis
from rq.exceptions import DeserializationError
from rq.job import Job, JobStatus
from rq.serializers import JSONSerializer
from rq.timeouts import JobTimeoutException, TimerDeathPenalty

from worker.store.records.claimed_job import ClaimedJob
from worker.store.records.job_record import (
    CALLBACKS,
    DATES,
    DEFAULT_MAX_JOB_BYTES,
    check_containers,
    unpack_payload,
)
from worker.threads.interrupts import as_class, current_call

_STILL_PACKED: Any = object()
"""Stands in RQ's `_data` for a payload that is still packed."""


__all__ = ["JobTimeoutException", "StoredJob", "ThreadDeathPenalty", "job_of", "timeout_error"]


class StoredJob(Job):
    """RQ's job with a payload that stays packed until it is read.

    max_bytes: the most bytes of the unpacked payload. Reading a larger payload raises TooLarge.
    """

    max_bytes = DEFAULT_MAX_JOB_BYTES
    _packed = b""

    @property
    def data(self) -> bytes:
        """The payload's JSON. It is unpacked anew each time, because keeping it could take much memory."""
        if self._data is not _STILL_PACKED:
            # RQ or user code has set other data, which RQ's own property returns.
            return Job.data.fget(self)  # type: ignore[attr-defined, no-any-return]
        return unpack_payload(self._packed, self.max_bytes)

    @data.setter
    def data(self, value: bytes) -> None:
        """Replace the payload's JSON."""
        Job.data.fset(self, value)  # type: ignore[attr-defined]

    def _deserialize_data(self) -> None:
        """Unpack and read the payload. Raises TooLarge or DeserializationError."""
        text = self.data
        check_containers("payload", text, self.max_bytes)
        try:
            self._func_name, self._instance, self._args, self._kwargs = self.serializer.loads(text)
        except Exception as error:
            raise DeserializationError from error

    def restore(self, raw_data: Any) -> None:
        """Read a job's fields as RQ does, but read dates faster and leave the payload packed."""
        values: dict[bytes, bytes] = dict(raw_data)
        packed = values.pop(b"data")
        dates = {name: values.pop(name.encode(), None) for name in DATES}
        super().restore({**values, b"data": b""})
        self._data = _STILL_PACKED
        self._packed = packed
        for name, value in dates.items():
            if value:
                setattr(self, name, datetime.fromisoformat(value.decode()))

    def show_started(self, worker_name: str, began_at: datetime) -> None:
        """Give this copy of the job the state of a running job, as RQ does."""
        self._status = JobStatus.STARTED
        self.worker_name = worker_name
        self.started_at = began_at
        self.last_heartbeat = began_at


def job_of(claimed: ClaimedJob, client: Redis, func_name: str | None = None) -> StoredJob:
    """Return a claimed job as RQ's job, as far as its hash could be read.

    func_name: the name of the job's function, if it is known. With this name, the job needs no payload.
    """
    record = claimed.record
    job = StoredJob(connection=client)
    job.serializer = JSONSerializer
    job.max_bytes = record.max_job_bytes
    # RQ's check of the id is left out. A job must be ended even if RQ's client would refuse its id.
    job._id = claimed.job_id
    with suppress(Exception):  # the error was noted as the job's damage when the record was read
        job.restore(record.fields)
    if func_name is not None:
        job._func_name = func_name
    for role, field in CALLBACKS.items():
        setattr(job, f"_{field}", record.callbacks.get(role))
    job.webhooks = list(record.webhooks)
    record.policy.put_on(job)
    return job


class ThreadDeathPenalty(TimerDeathPenalty):
    """RQ's time limit for callbacks, made safe for the threads of a pool.

    RQ's own class has two faults in a pool: it keeps the error's message in a class that all threads share, and its
    timer may interrupt a later call.
    """

    def __init__(
        self, timeout: float, exception: type[Exception] = JobTimeoutException, **kwargs: Any
    ) -> None:
        # RQ sets the message on the error's class, so each time limit has a class of its own.
        own_class = type(exception.__name__, (exception,), {})
        super().__init__(timeout, own_class, **kwargs)
        self._call = current_call()
        self._lock = threading.Lock()
        self._is_over = False

    def handle_death_penalty(self) -> None:
        """Interrupt the call, unless it is over. The timer's thread calls this."""
        with self._lock:
            if self._call is not None and not self._is_over:
                self._call.interrupt(self._exception)

    def cancel_death_penalty(self) -> None:
        """End the time limit, and let the rest of the call run.

        If the limit raises its error during this method, RQ swallows the error.
        """
        try:
            with self._lock:
                self._is_over = True
            super().cancel_death_penalty()
        finally:
            if self._call is not None:
                self._call.note_obeyed()


def timeout_error(timeout_s: float) -> type[Exception]:
    """Return the class of the error that is raised in a job that exceeds its timeout."""
    return as_class(
        JobTimeoutException(f"Task exceeded maximum timeout value ({timeout_s:g} seconds)")
    )
