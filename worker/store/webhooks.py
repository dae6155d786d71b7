"""Webhooks of jobs: calls that tell a host that a job has ended."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection
from functools import partial
from typing import Any

from rq.job import Job
from rq.webhook import Webhook

from jobs.context.webhooks import DEADLINE_S, call_webhook
from worker.threads.functions import FunctionPool

MAX_WAITING = 1000
"""Calls that may wait for a thread. A further one is dropped, so that slow hosts cannot fill memory."""


class Webhooks:
    """Sends jobs' webhooks in threads of their own, so that a host that answers slowly holds up nothing else.

    hosts: those that an operator allows, see `call_webhook`. What goes wrong is logged, as RQ does.
    """

    def __init__(self, pool: FunctionPool, hosts: Collection[str], log: logging.Logger) -> None:
        self.pool, self._hosts, self._log = pool, hosts, log

    def send(self, job: Job, status: str, exc_string: str | None = None) -> None:
        """Queue the calls that a job wants for this status; return at once. exc_string: why it failed."""
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
            self._failed(job_id, f"{type(error).__name__}: {error}")
        elif status is not None and not 200 <= status < 300:
            self._failed(job_id, f"it answered {status}")

    def _failed(self, job_id: str, reason: str) -> None:
        self._log.warning("job %s: a webhook was not sent: %s", job_id, reason)

    def close(self) -> None:
        """Give the calls under way the time that they may take; those that wait behind them are lost."""
        self.pool.close(DEADLINE_S)
        if self.pool.num_waiting:
            self._log.warning("webhooks: some were not sent, as the worker leaves")
