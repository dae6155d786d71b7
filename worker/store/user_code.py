"""Calls a job's function, callbacks and webhooks as RQ does."""

import json
import logging
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

from redis import Redis
from rq.callbacks import (
    execute_failure_callback,
    execute_stopped_callback,
    execute_success_callback,
)
from rq.job import Job, JobStatus
from rq.job_lifecycle import call_exception_handlers
from rq.utils import import_attribute as import_function
from rq.webhook import Webhook

from jobs.common.display import shown_error
from jobs.context.webhooks import DEADLINE_S, call_webhook
from worker.store.records.job_record import CALLBACKS, JobRecord
from worker.store.records.outcome import CaughtError, Outcome, traceback_text
from worker.store.records.stored_job import ThreadDeathPenalty
from worker.threads.functions import FunctionPool

__all__ = ["Callbacks", "Webhooks", "import_function", "perform"]

MAX_WAITING = 1000
"""The most webhooks that wait for a thread. Further webhooks are dropped, so that slow hosts cannot fill the memory."""


class Webhooks:
    """Sends webhooks in threads, and logs errors as RQ does. hosts: the allowed hosts, see `call_webhook`."""

    def __init__(self, pool: FunctionPool, hosts: Collection[str], log: logging.Logger) -> None:
        self.pool = pool
        self._hosts = hosts
        self._log = log

    def send(self, job: Job, status: str, exc_string: str | None = None) -> None:
        """Queue a job's webhooks for this status, and return at once. exc_string: why the job failed."""
        for webhook in job.webhooks:
            if webhook.job_status != status:
                continue
            if self.pool.num_waiting >= MAX_WAITING:
                self._log_failure(job.id, f"{MAX_WAITING} others wait already")
                continue
            call = partial(self._call, webhook, webhook.get_payload(job, exc_string=exc_string))
            self.pool.submit(call, partial(self._log_if_failed, job.id), is_interruptible=False)

    def _call(self, webhook: Webhook, payload: dict[str, Any]) -> int:
        """Send a webhook. Returns the status code of the host's response."""
        headers = dict(webhook.headers or {})
        body = None
        if webhook.method == "POST":
            headers = {"Content-Type": "application/json", **headers}
            body = json.dumps(payload).encode()
        return call_webhook(
            webhook.url, self._hosts, method=webhook.method, headers=headers, body=body
        )

    def _log_if_failed(self, job_id: str, status: int | None, error: BaseException | None) -> None:
        """Log a webhook that was not sent, or whose host refused it."""
        if error is not None:
            self._log_failure(job_id, shown_error(error))
        elif status is not None and not 200 <= status < 300:
            self._log_failure(job_id, f"it answered {status}")

    def _log_failure(self, job_id: str, reason: str) -> None:
        """Log that a webhook was not sent, or was refused."""
        self._log.warning("job %s: a webhook was not sent: %s", job_id, reason)

    def close(self) -> None:
        """Wait until the webhooks that are being sent have ended or timed out. Webhooks that still wait are lost."""
        self.pool.close(DEADLINE_S)
        if self.pool.num_waiting:
            self._log.warning("webhooks: some were not sent, as the worker leaves")


class Callbacks:
    """Calls the user's code at the end of a job, and sends webhooks.

    The user's code runs in a pool's thread. It gets `user_client`, a Redis client of its own.
    """

    def __init__(
        self,
        exception_handlers: Sequence[Callable[..., Any]],
        client: Redis,
        user_client: Redis,
        webhooks: Webhooks,
    ) -> None:
        self._exception_handlers = exception_handlers
        self._client = client
        self.user_client = user_client
        self.webhooks = webhooks

    def may_get_job(self, record: JobRecord) -> bool:
        """Whether a callback or an exception handler may get the job when the job ends."""
        return bool(record.callbacks or self._exception_handlers)

    def has_callback(self, outcome: Outcome, job: Job | None) -> bool:
        """Whether user code is called when a job ends with this outcome.

        job: the copy of the job that user code got, and may have changed; None if there is no copy.
        """
        if outcome.returned_retry is not None:
            return False  # RQ calls no callback for such a job
        callbacks = outcome.claimed.record.callbacks
        if job is not None:
            callbacks = _callbacks_of(job)
        if outcome.status == "finished":
            return "success callback" in callbacks
        if outcome.status == "stopped":
            return "stopped callback" in callbacks
        return "failure callback" in callbacks or bool(self._exception_handlers)

    def call_back(self, outcome: Outcome, job: Job, exc_info: Any) -> None:
        """Call the user's code for the end of a job. Raises the errors of that code.

        exc_info: the job's error, as sys.exc_info() returns it.
        """
        job.connection = self.user_client
        job.ended_at = outcome.ended_at
        if outcome.status == "finished":
            job._status = JobStatus.FINISHED
            job._result = outcome.value
            execute_success_callback(job, ThreadDeathPenalty, outcome.value)
        elif outcome.status == "stopped":
            execute_stopped_callback(job, ThreadDeathPenalty)
        else:
            job._status = JobStatus.FAILED
            self._handle_failure(job, exc_info)

    def _handle_failure(self, job: Job, exc_info: Any) -> None:
        """Call the failure callback, then the worker's exception handlers, even if the callback raises."""
        failure: BaseException | None = None
        try:
            execute_failure_callback(job, ThreadDeathPenalty, *exc_info)
        except BaseException as error:  # noqa: BLE001  # raised again below
            failure = error
            exc_info = (type(error), error, error.__traceback__)
        call_exception_handlers(self._exception_handlers, job, *exc_info)
        if failure is not None:
            raise failure

    def send_webhooks(self, outcome: Outcome, job: Job) -> None:
        """Queue the webhooks for the end of a job, and return at once."""
        job.connection = self._client
        job.ended_at = outcome.ended_at
        if outcome.returned_retry is not None:
            # A job that has asked for a retry once too often has failed, but without an error.
            if not outcome.policy.grants(outcome.returned_retry):
                self.webhooks.send(job, JobStatus.FAILED, exc_string="")
        elif outcome.status == "finished":
            self.webhooks.send(job, JobStatus.FINISHED)
        elif outcome.status == "failed" and outcome.is_final:
            self.webhooks.send(job, JobStatus.FAILED, exc_string=outcome.value)


def _callbacks_of(job: Job) -> dict[str, str]:
    """Return the names of a job's callbacks, by role.

    `job` is the copy that user code got. If that code changed the callbacks, the changed ones count.
    """
    callbacks = {}
    for role, field in CALLBACKS.items():
        name = getattr(job, f"_{field}")
        if name:
            callbacks[role] = name
    return callbacks


def perform(job: Job) -> Any:
    """Call a job's function. Returns its value. If it raises or is interrupted, returns a CaughtError."""
    try:
        return job.perform()
    except BaseException as error:  # noqa: BLE001  # user code raises what it likes
        return CaughtError(error, traceback_text(error))
