"""The user's code of a job, called as RQ calls it: its function, callbacks and webhooks."""

import json
import logging
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

from redis import Redis
from rq.callbacks import execute_failure_callback, execute_stopped_callback, execute_success_callback
from rq.job import Job, JobStatus
from rq.job_lifecycle import call_exception_handlers
from rq.utils import import_attribute as import_function
from rq.webhook import Webhook

from jobs.common.display import shown_error
from jobs.context.webhooks import DEADLINE_S, call_webhook
from worker.store.records.job_record import CALLBACKS, JobRecord
from worker.store.records.outcome import Outcome
from worker.store.records.results import Raised, printable
from worker.store.records.stored_job import ThreadDeathPenalty
from worker.threads.functions import FunctionPool

__all__ = ["Callbacks", "Webhooks", "import_function", "perform"]

MAX_WAITING = 1000
"""Calls that may wait for a thread. A further one is dropped, so that slow hosts cannot fill memory."""


class Webhooks:
    """Sends webhooks in threads, logging errors as RQ does. hosts: allowed ones, see `call_webhook`."""

    def __init__(self, pool: FunctionPool, hosts: Collection[str], log: logging.Logger) -> None:
        self.pool, self._hosts, self._log = pool, hosts, log

    def send(self, job: Job, status: str, exc_string: str | None = None) -> None:
        """Queue a job's calls for this status; return at once. exc_string: why it failed."""
        for webhook in job.webhooks:
            if webhook.job_status != status:
                continue
            if self.pool.num_waiting >= MAX_WAITING:
                self._failed(job.id, f"{MAX_WAITING} others wait already")
                continue
            call = partial(self._call, webhook, webhook.get_payload(job, exc_string=exc_string))
            self.pool.submit(call, partial(self._done, job.id), raises=False)

    def _call(self, webhook: Webhook, payload: dict[str, Any]) -> int:
        headers, body = dict(webhook.headers or {}), None
        if webhook.method == "POST":
            headers, body = {"Content-Type": "application/json", **headers}, json.dumps(payload).encode()
        return call_webhook(webhook.url, self._hosts, method=webhook.method, headers=headers, body=body)

    def _done(self, job_id: str, status: int | None, error: BaseException | None) -> None:
        if error is not None:
            self._failed(job_id, shown_error(error))
        elif status is not None and not 200 <= status < 300:
            self._failed(job_id, f"it answered {status}")

    def _failed(self, job_id: str, reason: str) -> None:
        self._log.warning("job %s: a webhook was not sent: %s", job_id, reason)

    def close(self) -> None:
        """Wait for the calls under way as long as they may take; waiting ones are lost."""
        self.pool.close(DEADLINE_S)
        if self.pool.num_waiting:
            self._log.warning("webhooks: some were not sent, as the worker leaves")


class Callbacks:
    """The user's code around the end of a job, in a pool thread with its client, and webhooks."""

    def __init__(
        self, exception_handlers: Sequence[Callable[..., Any]], client: Redis, user_client: Redis, webhooks: Webhooks
    ) -> None:
        self._exception_handlers, self._client = exception_handlers, client
        self.user_client, self.webhooks = user_client, webhooks

    def may_see(self, record: JobRecord) -> bool:
        """Whether user code gets the job, however it ends."""
        return bool(record.callbacks or self._exception_handlers)

    def has_callback(self, outcome: Outcome, job: Job | None) -> bool:
        """Whether user code is called when the job ends like this. job: its code's copy, if it had one."""
        callbacks = outcome.claimed.record.callbacks if job is None else _callbacks_of(job)
        if outcome.wish is not None:
            return False
        if outcome.status == "finished":
            return "success callback" in callbacks
        if outcome.status == "stopped":
            return "stopped callback" in callbacks
        return bool("failure callback" in callbacks or self._exception_handlers)

    def call_back(self, outcome: Outcome, job: Job, exc_info: Any) -> None:
        """Call the user's code for this end; raises its errors. exc_info: as of sys.exc_info()."""
        job.connection = self.user_client
        job.ended_at = outcome.ended_at
        if outcome.status == "finished":
            job._status, job._result = JobStatus.FINISHED, outcome.value
            execute_success_callback(job, ThreadDeathPenalty, outcome.value)
        elif outcome.status == "stopped":
            execute_stopped_callback(job, ThreadDeathPenalty)
        else:
            job._status = JobStatus.FAILED
            self._handle_failure(job, exc_info)

    def _handle_failure(self, job: Job, exc_info: Any) -> None:
        """Call the failure callback, then the worker's exception handlers, even after an error."""
        failure: BaseException | None = None
        try:
            execute_failure_callback(job, ThreadDeathPenalty, *exc_info)
        except BaseException as error:  # noqa: BLE001  # raised again below
            failure, exc_info = error, (type(error), error, error.__traceback__)
        call_exception_handlers(self._exception_handlers, job, *exc_info)
        if failure is not None:
            raise failure

    def send_webhooks(self, outcome: Outcome, job: Job) -> None:
        """Tell the hosts that the job has ended; returns before they are told."""
        job.connection, job.ended_at = self._client, outcome.ended_at
        if outcome.wish is not None:
            if not outcome.policy.grants(outcome.wish):
                self.webhooks.send(job, JobStatus.FAILED, exc_string="")
        elif outcome.status == "finished":
            self.webhooks.send(job, JobStatus.FINISHED)
        elif outcome.status == "failed" and outcome.is_final:
            self.webhooks.send(job, JobStatus.FAILED, exc_string=outcome.value)


def _callbacks_of(job: Job) -> dict[str, str]:
    """Return the callbacks in a job's copy, which its code may have changed."""
    named = {role: getattr(job, f"_{field}") for role, field in CALLBACKS.items()}
    return {role: name for role, name in named.items() if name}


def perform(job: Job) -> Any:
    """Call a job's function. Returns a Raised for its errors, its interrupts too."""
    try:
        return job.perform()
    except BaseException as error:  # noqa: BLE001  # user code raises what it likes
        return Raised(error, printable(error))
