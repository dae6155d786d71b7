"""rq-dashboard 0.9 with what it lacks: JSON payloads everywhere, and pages that survive a deleted job.

It listens on 127.0.0.1 only; put an authenticating proxy before it to show it to others. Prompts stay
hidden: RQ's job description repeats the whole prompt, so the function's name is shown in its place.
`--show-prompts` brings them back.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import click
from rq import Worker
from rq.exceptions import DeserializationError, NoSuchJobError
from rq.job import Job
from rq.serializers import JSONSerializer
from rq_dashboard import web
from rq_dashboard.cli import make_flask_app


class JsonWorker(Worker):
    """Reads workers as JSON, and shows one whose current job was deleted as idle."""

    @classmethod
    def all(cls, *args: Any, **kwargs: Any) -> Any:
        """List all workers, with the JSON serializer."""
        return super().all(*args, **{**kwargs, "serializer": JSONSerializer})

    def get_current_job(self) -> Job | None:
        """The job it shows, None where that is gone."""
        try:
            return super().get_current_job()
        except NoSuchJobError:
            return None


def function_name(job: Job) -> str:
    """What stands in for a job's description."""
    try:
        return str(job.func_name)
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


@click.command()
@click.option("--redis-url", default=lambda: os.environ.get("RQ_REDIS_URL", "redis://127.0.0.1:6379"))
@click.option("--port", default=9181, help="Port on 127.0.0.1.")
@click.option("--show-prompts", is_flag=True, help="Show job descriptions, which hold the prompts.")
def main(redis_url: str, port: int, show_prompts: bool) -> None:
    """Serve the dashboard until stopped."""
    # rq-dashboard has no seam for any of these; the names are pinned with its version.
    web.Worker = JsonWorker
    web.config.serializer = JSONSerializer
    web.escape_format_instance_list = show_servers
    if not show_prompts:
        web.format_job_description = function_name
        web.serialize_current_job = show_job
    app = make_flask_app(None, None, None, "")
    app.config["RQ_DASHBOARD_REDIS_URL"] = redis_url
    app.config["RQ_DASHBOARD_DISABLE_DELETE"] = True
    app.config["DEPRECATED_OPTIONS"] = []
    web.setup_rq_connection(app)
    click.echo(f"dashboard on http://127.0.0.1:{port}")
    app.run(host="127.0.0.1", port=port)


if __name__ == "__main__":
    main()
