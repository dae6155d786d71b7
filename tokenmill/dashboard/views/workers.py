"""The pages of workers."""

from typing import Any

from starlette.requests import Request

from jobs.common.display import safe_name
from jobs.common.rq_jobs import SUSPENDED_KEY
from jobs.common.worker_deaths import WorkerDeath, read_deaths
from tokenmill.dashboard.history.marks import last_end
from tokenmill.dashboard.views.site import PAGE_ROWS, Missing, Page, Site, if_allowed

#: The most deaths that a page shows.
MAX_DEATHS = 20


def workers(site: Site, request: Request) -> dict[str, Any]:
    """Read the workers: silent ones first, then draining ones. Parameters: page."""
    look = site.watcher.look()
    page = Page.requested(request, "page", len(look.workers))
    return {
        "look": look,
        "workers": look.workers[page.first : page.first + PAGE_ROWS],
        "is_suspended": if_allowed(lambda: bool(site.connection.exists(SUSPENDED_KEY)), None),
        "deaths": _deaths(site)[:MAX_DEATHS],
        "page": page,
    }


def worker(site: Site, request: Request) -> dict[str, Any]:
    """Read one worker. `worker` is None if the worker is not registered any more."""
    name = request.path_params["worker"]
    row = None
    for listed in site.watcher.look().workers:
        if listed.name == name:
            row = listed
            break
    deaths = [death for death in _deaths(site) if death.worker == safe_name(name)]
    end = None
    if row is None:
        end = if_allowed(lambda: last_end(site.connection, name, site.watcher.clock()), None)
        if end is None and not deaths:
            raise Missing("Redis does not know this worker: it has ended, or died long ago.")
    return {"worker": row, "worker_name": name, "end": end, "deaths": deaths[:MAX_DEATHS]}


def _deaths(site: Site) -> list[WorkerDeath]:
    """Return the recorded deaths of workers; [] if Redis does not let this user read them."""
    return if_allowed(lambda: read_deaths(site.connection), [])
