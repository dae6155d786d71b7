"""The pages of workers."""

from typing import Any

from starlette.requests import Request

from jobs.common.display import safe_name
from jobs.common.rq_jobs import SUSPENDED_KEY
from jobs.common.worker_deaths import WorkerDeath, read_deaths
from tokenmill.dashboard.history.marks import last_end
from tokenmill.dashboard.views.site import PAGE_ROWS, Missing, Page, Site, if_allowed

#: The most deaths that a page names.
MAX_DEATHS = 20


def workers(site: Site, request: Request) -> dict[str, Any]:
    """List the workers, those in trouble first. Parameters: page."""
    look = site.watcher.look()
    page = Page.asked(request, "page", len(look.workers))
    return {
        "look": look,
        "workers": look.workers[page.first : page.first + PAGE_ROWS],
        "is_suspended": if_allowed(lambda: bool(site.connection.exists(SUSPENDED_KEY)), None),
        "deaths": _deaths(site)[:MAX_DEATHS],
        "page": page,
    }


def worker(site: Site, request: Request) -> dict[str, Any]:
    """Show one worker."""
    name = request.path_params["worker"]
    rows = [row for row in site.watcher.look().workers if row.name == name]
    deaths = [death for death in _deaths(site) if death.worker == safe_name(name)]
    end = None
    if not rows:
        end = if_allowed(lambda: last_end(site.connection, name, site.watcher.clock()), None)
    if not rows and not deaths and end is None:
        raise Missing("Redis does not know this worker: it has ended, or died long ago.")
    return {
        "worker": rows[0] if rows else None,
        "worker_name": name,
        "end": end,
        "deaths": deaths[:MAX_DEATHS],
    }


def _deaths(site: Site) -> list[WorkerDeath]:
    return if_allowed(lambda: read_deaths(site.connection), [])
