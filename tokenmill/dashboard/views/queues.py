"""The pages of queues."""

from typing import Any

from starlette.requests import Request

from jobs.common.rq_jobs import SUSPENDED_KEY
from jobs.queues import PLACES, count_queues
from tokenmill.dashboard.seen.queue_jobs import list_jobs
from tokenmill.dashboard.views.site import PAGE_ROWS, Missing, Page, Site, if_allowed


def queues(site: Site, request: Request) -> dict[str, Any]:
    """Read the queues, the busiest first. Parameters: page."""
    look = site.watcher.look()
    page = Page.requested(request, "page", len(look.queues))
    # By queue: the workers that serve it and are not silent.
    num_workers: dict[str, int] = {}
    for worker in look.workers:
        for name in worker.serves:
            num_workers.setdefault(name, 0)
            if not worker.is_silent:
                num_workers[name] += 1
    return {
        "look": look,
        "queues": look.queues[page.first : page.first + PAGE_ROWS],
        "listened": num_workers,
        "page": page,
    }


def queue(site: Site, request: Request) -> dict[str, Any]:
    """Read one queue. Parameters: place (one of PLACES, "waiting" by default), page."""
    name = request.path_params["queue"]
    look = site.watcher.look()
    [counted] = count_queues(site.connection, [name])
    is_listed = any(row.name == name for row in look.queues)
    if not is_listed and not any(counted.counts.values()):
        raise Missing("There is no queue of this name.")
    place = request.query_params.get("place", "waiting")
    if place not in PLACES:
        raise Missing("A queue has no such place for jobs.")
    total = counted.counts[place]
    page = Page.requested(request, "page", total)
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
