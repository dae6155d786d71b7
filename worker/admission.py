"""What may run on this worker: JSON payloads that call functions on an exact list."""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches
from urllib.parse import urlparse

from worker.errors import NotAllowed, TooLarge
from worker.store.function_call import FunctionCall, call_of
from worker.store.held_job import HeldJob
from worker.store.user_code import callback_names, strip_callbacks

MAX_ID_CHARS = 255
"""An id is in the names of a dozen keys, in the answer and in the log."""


class Admission:
    """Decides by exact name, before any import.

    A pattern such as `jobs.*` would let `jobs.os.system` through, because RQ resolves a name attribute by
    attribute. Callbacks are held to the same list, and a job may not carry an object to call.
    """

    def __init__(self, allowed: Collection[str], webhook_hosts: Collection[str]) -> None:
        self._allowed, self._webhook_hosts = frozenset(allowed), frozenset(webhook_hosts)

    def admit(self, job: HeldJob) -> FunctionCall:
        """Return what the job calls. Raises BadPayload, TooLarge or NotAllowed.

        Webhooks to hosts that are not allowed are taken off the job.
        """
        if len(job.id) > MAX_ID_CHARS:
            raise TooLarge(
                f"the job's id has {len(job.id)} characters, more than the limit of {MAX_ID_CHARS}: "
                "enqueue it with a shorter one, or with none, and RQ makes one"
            )
        call = call_of(job)
        if call.name not in self._allowed:
            raise NotAllowed("function", call.name, self._nearest(call.name))
        for role, name in callback_names(job):
            if name not in self._allowed:
                raise NotAllowed(role, name, self._nearest(name))
        self._keep_allowed_webhooks(job)
        return call

    def keep_allowed_hooks(self, job: HeldJob) -> None:
        """Take off a job that is only to be ended what may not be called here, and leave it its retries."""
        if any(name not in self._allowed for _, name in callback_names(job)):
            strip_callbacks(job)
        self._keep_allowed_webhooks(job)

    def _keep_allowed_webhooks(self, job: HeldJob) -> None:
        job.webhooks = [hook for hook in job.webhooks if urlparse(hook.url).hostname in self._webhook_hosts]

    def _nearest(self, name: str) -> str | None:
        near = get_close_matches(name[:MAX_ID_CHARS], self._allowed, n=1, cutoff=0.8)
        return near[0] if near else None
