"""rq-dashboard 0.9 with what it lacks: it reads JSON only, acts for its own pages only, survives odd jobs.

Prompts stay hidden: RQ's job description repeats the whole prompt, so the function's name is shown in its
place. `--show-prompts` brings them back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from flask import Flask, abort, current_app
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from rq import Queue, Worker
from rq.exceptions import DeserializationError, NoSuchJobError
from rq.job import Job
from rq.serializers import DefaultSerializer, JSONSerializer
from rq_dashboard import web
from rq_dashboard.cli import make_flask_app

from jobs.watch.queues import queue_names
from jobs.watch.requeue import REQUEUE_LIMIT, requeue, requeue_all

from .guard import guard
from .strange_keys import DamagedJob, count_waiting, show_strange_keys

#: Characters of a function's name that a page shows: it is whatever a producer wrote.
MAX_NAME_CHARS = 255


class ShownQueue(Queue):
    """Lists a damaged job as such, where it would take its page with it."""

    def fetch_job(self, job_id: str) -> Job | None:
        """The job, or what stands for it; None where it is gone."""
        try:
            job: Job | None = super().fetch_job(job_id)
            if job is not None:
                job.latest_result()
        except RedisConnectionError:
            raise
        except Exception as error:  # noqa: BLE001  # a hash may hold anything
            job = DamagedJob(self.connection, job_id, type(error).__name__)
        return job

    @property
    def count(self) -> Any:
        """Its length, or what stands for it."""
        return count_waiting(self)

    @classmethod
    def all(cls, connection: Redis, *args: Any, **kwargs: Any) -> Any:
        """The queues whose names can be read."""
        names = [name.decode(errors="replace") for name in queue_names(connection)]
        return [cls(name, connection=connection, serializer=JSONSerializer) for name in names]


class ShownWorker(Worker):
    """Shows a worker whose current job was deleted as idle, and none that cannot be read."""

    @classmethod
    def all(cls, connection: Any = None, *args: Any, **kwargs: Any) -> Any:
        """The workers whose names and hashes can be read, as in `tokenmill info`."""
        keys = [key.decode(errors="replace") for key in connection.smembers(cls.redis_workers_keys)]
        found = [cls._find(key, connection) for key in keys]
        return [worker for worker in found if worker is not None]

    @classmethod
    def _find(cls, key: str, connection: Redis) -> Any:
        try:
            return cls.find_by_key(key, connection=connection, serializer=JSONSerializer)
        except RedisConnectionError:
            raise
        except Exception:  # noqa: BLE001  # a hash may hold anything
            return None

    def get_current_job(self) -> Job | None:
        """The job it shows, None where that is gone."""
        try:
            return super().get_current_job()
        except NoSuchJobError:
            return None


def function_name(job: Job) -> str:
    """What stands in for a job's description."""
    if isinstance(job, DamagedJob):
        return str(job.description)
    try:
        return str(job.func_name)[:MAX_NAME_CHARS]
    except DeserializationError:
        return "payload is not JSON"


def show_job(job: Job | None) -> str | dict[str, Any]:
    """The worker page's cell for its current job."""
    if job is None:
        return "idle"
    name = function_name(job)
    return {
        "job_id": job.id,
        "description": name,
        "created_at": web.serialize_date(job.created_at),
        "call_string": name,
    }


def show_servers(urls: str | Sequence[str]) -> list[str]:
    """Addresses of Redis servers for the pages: without user, password and options, which may be secret."""
    addresses = [urlsplit(url) for url in ([urls] if isinstance(urls, str) else urls)]
    return [f"{url.scheme}://{url.netloc.rpartition('@')[2]}{url.path}" for url in addresses]


def _redis() -> Redis:
    app: Any = current_app  # rq-dashboard puts it there
    connection: Redis = app.redis_conn
    return connection


def requeue_one(job_id: str) -> dict[str, Any]:
    """Answer the requeue button of a job."""
    redis = _redis()
    origin: Any = redis.hget(Job.key_for(job_id), "origin") or b""
    if not requeue(redis, origin.decode(errors="replace"), [job_id.encode()]).done:
        abort(409, "this job is not among the failed ones of its queue")
    return {"status": "OK"}


def requeue_failed(queue_name: str) -> dict[str, Any]:
    """Answer the button that requeues a whole list; RQ's own way stops at the first job it cannot read."""
    chunks = requeue_all(_redis(), queue_name, REQUEUE_LIMIT)
    return {"status": "OK", "count": sum(len(chunk.done) for chunk in chunks)}


def never_unpickle() -> None:
    """Make this process read JSON wherever RQ, or rq-dashboard, would load a pickle: that runs its code."""
    DefaultSerializer.loads = JSONSerializer.loads
    DefaultSerializer.dumps = JSONSerializer.dumps
    web.config.serializer = JSONSerializer


def rq_app(redis_url: str, *, show_prompts: bool) -> Flask:
    """Return rq-dashboard as a WSGI application. Changes rq-dashboard and RQ for the whole process."""
    # rq-dashboard has no seam for any of these; the names are pinned with its version.
    never_unpickle()
    web.Queue, web.Worker = ShownQueue, ShownWorker
    web.escape_format_instance_list = show_servers
    if not show_prompts:
        web.format_job_description = function_name
        web.serialize_current_job = show_job
    app: Flask = make_flask_app(None, None, None, "")
    app.view_functions["rq_dashboard.requeue_job_view"] = requeue_one
    app.view_functions["rq_dashboard.requeue_all"] = requeue_failed
    app.config["RQ_DASHBOARD_REDIS_URL"] = redis_url
    app.config["RQ_DASHBOARD_DISABLE_DELETE"] = True
    app.config["DEPRECATED_OPTIONS"] = []
    show_strange_keys(app)
    guard(app)
    web.setup_rq_connection(app)
    return app
