"""Lists the pages by their paths."""

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

#: The function of a page. It returns the values for the page's template. It may raise Missing, Moved and RedisError.
View = Callable[[Site, Request], dict[str, Any]]


def missing(site: Site, request: Request) -> dict[str, Any]:
    """Raise Missing, for any path that is no page."""
    raise Missing("There is no such page.")


#: By path: the page's function. The page's template has the same name.
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
