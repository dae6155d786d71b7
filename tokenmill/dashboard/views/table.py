"""Names every page by its path and its template."""

from collections.abc import Callable, Mapping
from typing import Any

from starlette.requests import Request

from tokenmill.dashboard.views.actions import actions
from tokenmill.dashboard.views.batches import batches
from tokenmill.dashboard.views.failed import failed
from tokenmill.dashboard.views.jobs import job
from tokenmill.dashboard.views.overview import overview
from tokenmill.dashboard.views.queues import queue, queues
from tokenmill.dashboard.views.runs import run, runs
from tokenmill.dashboard.views.search import search
from tokenmill.dashboard.views.site import Missing, Site
from tokenmill.dashboard.views.workers import worker, workers

View = Callable[[Site, Request], dict[str, Any]]


def missing(site: Site, request: Request) -> dict[str, Any]:
    """Answer for all paths that are no page of ours."""
    raise Missing("There is no such page.")


#: Path -> the page's function, whose name is that of its template.
PAGES: Mapping[str, View] = {
    "/": overview,
    "/failed": failed,
    "/queues": queues,
    "/queues/{queue:path}": queue,
    "/workers": workers,
    "/workers/{worker:path}": worker,
    "/runs": runs,
    "/runs/{run}": run,
    "/jobs/{job_id:path}": job,
    "/batches": batches,
    "/actions": actions,
    "/search": search,
}
