"""Shows keys that are not what RQ keeps there: any producer may have written them."""

from __future__ import annotations

from typing import Any

from flask import Flask, abort
from redis import Redis
from redis.exceptions import ResponseError
from rq import Queue
from rq.exceptions import NoSuchJobError
from rq.job import Job
from rq.registry import (
    BaseRegistry,
    CanceledJobRegistry,
    DeferredJobRegistry,
    FailedJobRegistry,
    FinishedJobRegistry,
    ScheduledJobRegistry,
    StartedJobRegistry,
)
from rq.serializers import JSONSerializer
from rq_dashboard import web

from jobs.common.shown import safe_name

#: What stands for a count that cannot be had.
UNKNOWN = "?"

#: The keys of a queue's pages, by the registry's name in their addresses.
_REGISTRIES: dict[str, type[BaseRegistry]] = {
    "canceled": CanceledJobRegistry,
    "deferred": DeferredJobRegistry,
    "failed": FailedJobRegistry,
    "finished": FinishedJobRegistry,
    "scheduled": ScheduledJobRegistry,
    "started": StartedJobRegistry,
}


class DamagedJob(Job):
    """Stands for a job, or a list of jobs, that RQ's client cannot read."""

    def __init__(self, connection: Redis, name: str, reason: str) -> None:
        super().__init__(connection=connection, serializer=JSONSerializer)
        self._id = name  # unchecked: RQ may refuse the very id
        self.description = f"cannot be read: {reason}"

    def latest_result(self, timeout: int = 0) -> None:
        """None is looked for."""


def show_strange_keys(app: Flask) -> None:
    """Make rq-dashboard's pages name what they cannot read, and show the rest."""
    list_jobs = web.get_queue_registry_jobs_count

    def list_readable(
        queue_name: str, registry_name: str, offset: int, per_page: int, order: str, connection: Redis
    ) -> tuple[int, list[dict[str, Any]]]:
        key, expected = _key(queue_name, registry_name)
        found: Any = connection.type(key)
        if found in (b"none", expected.encode()):
            try:
                return list_jobs(queue_name, registry_name, offset, per_page, order, connection)  # type: ignore[no-any-return]
            except UnicodeDecodeError:
                reason = "it holds an id that is no UTF-8"
        else:
            reason = f"it is of type {found.decode()}, expected {expected}"
        told = f"{reason}; a worker of this queue sets that aside, or DEL the key"
        return 1, [web.serialize_job(DamagedJob(connection, key, told))]

    web.get_queue_registry_jobs_count = list_readable
    BaseRegistry.get_job_count = _count  # type: ignore[assignment, method-assign]
    app.register_error_handler(ResponseError, _tell_refusal)
    app.register_error_handler(NoSuchJobError, _tell_gone)


def count_waiting(queue: Queue) -> int | str:
    """A queue's length, UNKNOWN where its key is no list."""
    try:
        return int(queue.connection.llen(queue.key))
    except ResponseError:
        return UNKNOWN


def _count(registry: BaseRegistry, cleanup: bool = True) -> int | str:
    """A registry's size, UNKNOWN where its key is no sorted set; cleaning up is for workers."""
    try:
        return int(registry.connection.zcard(registry.key))
    except ResponseError:
        return UNKNOWN


def _key(queue_name: str, registry_name: str) -> tuple[str, str]:
    """Return a page's key, and the type that it should be of."""
    if registry_name == "queued":
        return f"{Queue.redis_queue_namespace_prefix}{queue_name}", "list"
    if registry_name not in _REGISTRIES:
        abort(404, "no such list of jobs")
    return _REGISTRIES[registry_name].key_template.format(queue_name), "zset"


def _tell_refusal(error: ResponseError) -> tuple[str, int]:
    text = f"Redis refused: {safe_name(str(error))}: a key is not what RQ keeps there; see `tokenmill info`"
    return text, 502


def _tell_gone(error: NoSuchJobError) -> tuple[str, int]:
    return "no such job: it has expired, or was deleted", 404
