"""The first page: queues, runs, workers and failed jobs at a glance."""

from typing import Any

from starlette.requests import Request

from tokenmill.dashboard.views.runs import running_first
from tokenmill.dashboard.views.site import PAGE_ROWS, Page, Site

#: The most runs that are shown.
MAX_RUNS = 12


def overview(site: Site, request: Request) -> dict[str, Any]:
    """Read what the first page shows. Parameters: workers (the page of the workers' table)."""
    look = site.watcher.look()
    page = Page.requested(request, "workers", len(look.workers))
    return {
        "look": look,
        "failed": site.watcher.newest_failed(),
        "runs": running_first(look.runs)[:MAX_RUNS],
        "workers": look.workers[page.first : page.first + PAGE_ROWS],
        "workers_page": page,
    }
