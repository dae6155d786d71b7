"""The page of failed jobs, grouped by their cause."""

from typing import Any

from starlette.requests import Request

from jobs.queues import count_queues, queue_names
from tokenmill.dashboard.failures.groups import Remedy
from tokenmill.dashboard.seen.watcher import MAX_QUEUES
from tokenmill.dashboard.views.site import PAGE_ROWS, Missing, Page, Site, with_failed

#: Seconds for which a request reads errors that are not known yet.
READ_S = 0.08
#: The most groups that are shown.
MAX_GROUPS = 100


def failed(site: Site, request: Request) -> dict[str, Any]:
    """Show the failed jobs by cause. Parameters: queue, group (all by default), text (of an error), page."""
    # Runs and workers are not shown here, so they are not looked at.
    queues = count_queues(site.connection, queue_names(site.connection)[:MAX_QUEUES])
    counts = {each.name: each.counts["failed"] for each in queues}
    queue = request.query_params.get("queue", "")
    group = request.query_params.get("group", "")
    text = request.query_params.get("text", "")[:200]
    if queue and queue not in counts:
        raise Missing("There is no queue of this name.")

    index = site.failures
    index.advance(with_failed(queues), READ_S)
    groups = index.groups(queue, text)
    shown = [each for each in groups if each.cause.key == group] if group else groups
    cause = shown[0].cause if group and shown else None
    num_jobs = sum(each.num_jobs for each in shown)
    page = Page.asked(request, "page", num_jobs)
    keys = {each.cause.key for each in shown} if group or text else None
    chosen = index.newest(page.first, PAGE_ROWS, queue, keys)
    total = counts[queue] if queue else sum(counts.values())
    return {
        "queues": {name: count for name, count in counts.items() if count or name == queue},
        "queue": queue,
        "group": group,
        "cause": cause,
        "text": text,
        "groups": groups[:MAX_GROUPS],
        "num_groups": len(groups),
        "jobs": site.failed_rows.read(chosen),
        "num_jobs": num_jobs,
        "total": total,
        "num_wrong": sum(each.num_jobs for each in shown if each.cause.remedy is Remedy.CLIENT),
        "has_stopped": any(each.cause.remedy is Remedy.CANCELLED for each in shown),
        "is_whole": index.is_whole,
        "num_known": index.num_jobs,
        "wrong": Remedy.CLIENT,
        "page": page,
    }
