"""What may run on this worker: JSON payloads that call functions on an exact list."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any
from urllib.parse import urlparse

from rq.exceptions import DeserializationError
from rq.job import Job

from worker.errors import BadPayload, NotAllowed, TooLarge
from worker.store.job_store import callback_names, strip_callbacks

MAX_ID_CHARS = 255
"""An id is in the names of a dozen keys, in the answer and in the log."""


@dataclass(frozen=True)
class FunctionCall:
    """A job's payload: a dotted name and its arguments. Nothing of it has been imported."""

    name: str
    args: list[Any]
    kwargs: dict[str, Any]


class Admission:
    """Decides by exact name, before any import.

    A pattern such as `jobs.*` would let `jobs.os.system` through, because RQ resolves a name attribute by
    attribute. Callbacks are held to the same list, and a job may not carry an object to call.
    """

    def __init__(self, allowed: Collection[str], webhook_hosts: Collection[str]) -> None:
        self._allowed, self._webhook_hosts = frozenset(allowed), frozenset(webhook_hosts)

    def admit(self, job: Job) -> FunctionCall:
        """Return what the job calls. Raises BadPayload, TooLarge or NotAllowed.

        Webhooks to hosts that are not allowed are taken off the job.
        """
        if len(job.id) > MAX_ID_CHARS:
            raise TooLarge(
                f"the job's id has {len(job.id)} characters, more than the limit of {MAX_ID_CHARS}: "
                "enqueue it with a shorter one, or with none, and RQ makes one"
            )
        call = _decode(job)
        if call.name not in self._allowed:
            raise NotAllowed("function", call.name, self._nearest(call.name))
        for role, name in callback_names(job):
            if name not in self._allowed:
                raise NotAllowed(role, name, self._nearest(name))
        self._keep_allowed_webhooks(job)
        return call

    def keep_allowed_hooks(self, job: Job) -> None:
        """Take off a job that is only to be ended what may not be called here, and leave it its retries."""
        if any(name not in self._allowed for _, name in callback_names(job)):
            strip_callbacks(job)
        self._keep_allowed_webhooks(job)

    def _keep_allowed_webhooks(self, job: Job) -> None:
        job.webhooks = [hook for hook in job.webhooks if urlparse(hook.url).hostname in self._webhook_hosts]

    def _nearest(self, name: str) -> str | None:
        near = get_close_matches(name[:MAX_ID_CHARS], self._allowed, n=1, cutoff=0.8)
        return near[0] if near else None


def _decode(job: Job) -> FunctionCall:
    try:
        name, instance, args, kwargs = job.func_name, job.instance, job.args, job.kwargs
    except DeserializationError as error:
        raise BadPayload(
            "the payload is not JSON: enqueue with the JSON serializer (rq enqueue -S json, or "
            'Queue(..., serializer="json")); other payloads are never loaded'
        ) from error
    if not (isinstance(name, str) and isinstance(args, list) and isinstance(kwargs, dict)):
        raise BadPayload("the payload is JSON, but not [function name, null, [arguments], {keywords}]")
    if instance is not None:
        raise BadPayload("the payload calls a method of an object; only plain functions run here")
    return FunctionCall(name, args, kwargs)
