"""The pages of queues."""

from typing import Any

from starlette.requests import Request

from jobs.common.rq_jobs import SUSPENDED_KEY
from jobs.queues import PLACES, count_queues
from tokenmill.dashboard.seen.queue_jobs import list_jobs
from tokenmill.dashboard.views.site import PAGE_ROWS, Missing, Page, Site, if_allowed


def queues(site: Site, request: Request) -> dict[str, Any]:
    """List the queues, the busiest first. Parameters: page."""
    look = site.watcher.look()
    page = Page.asked(request, "page", len(look.queues))
    listened: dict[str, int] = {}
    for worker in look.workers:
        for name in worker.serves:
            listened[name] = listened.get(name, 0) + (not worker.is_silent)
    return {
        "look": look,
        "queues": look.queues[page.first : page.first + PAGE_ROWS],
        "listened": listened,
        "page": page,
    }


def queue(site: Site, request: Request) -> dict[str, Any]:
    """Show one queue. Parameters: place (one of PLACES, waiting by default), page."""
    name = request.path_params["queue"]
    look = site.watcher.look()
    counted = count_queues(site.connection, [name])[0]
    if name not in [each.name for each in look.queues] and not any(counted.counts.values()):
        raise Missing("There is no queue of this name.")
    place = request.query_params.get("place", "waiting")
    if place not in PLACES:
        raise Missing("A queue has no such place for jobs.")
    total = counted.counts[place]
    page = Page.asked(request, "page", total)
    return {
        "queue": counted,
        "queue_name": name,
        "place": place,
        "total": total,
        "jobs": list_jobs(site.connection, name, place, page.first, PAGE_ROWS),
        "is_suspended": if_allowed(lambda: bool(site.connection.exists(SUSPENDED_KEY)), None),
        "workers": [worker for worker in look.workers if name in worker.serves],
        "page": page,
    }
