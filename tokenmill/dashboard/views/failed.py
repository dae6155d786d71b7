"""The page of failed jobs, grouped by their cause."""

from typing import Any

from starlette.requests import Request

from jobs.queues import count_queues, queue_names
from tokenmill.dashboard.failures.groups import Remedy
from tokenmill.dashboard.seen.watcher import MAX_QUEUES
from tokenmill.dashboard.views.site import PAGE_ROWS, Missing, Page, Site, with_failed

#: The seconds for which a request reads errors that are not known yet.
READ_S = 0.08
#: The most groups that are shown.
MAX_GROUPS = 100
#: The most characters of the text by which errors are filtered.
MAX_TEXT_CHARS = 200


def failed(site: Site, request: Request) -> dict[str, Any]:
    """Read the failed jobs by their cause. Parameters: queue, group (all by default), text (of an error), page."""
    # The page shows neither runs nor workers, so it counts the queues itself instead of using the watcher.
    queues = count_queues(site.connection, queue_names(site.connection)[:MAX_QUEUES])
    num_failed = {counted.name: counted.counts["failed"] for counted in queues}
    queue = request.query_params.get("queue", "")
    group_key = request.query_params.get("group", "")
    text = request.query_params.get("text", "")[:MAX_TEXT_CHARS]
    if queue and queue not in num_failed:
        raise Missing("There is no queue of this name.")

    index = site.failures
    index.advance(with_failed(queues), READ_S)
    groups = index.groups(queue, text)
    chosen_groups = groups
    cause = None
    if group_key:
        chosen_groups = [group for group in groups if group.cause.key == group_key]
        if chosen_groups:
            cause = chosen_groups[0].cause

    num_jobs = 0
    num_wrong = 0
    has_stopped = False
    for group in chosen_groups:
        num_jobs += group.num_jobs
        if group.cause.remedy is Remedy.CLIENT:
            num_wrong += group.num_jobs
        if group.cause.remedy is Remedy.CANCELLED:
            has_stopped = True

    page = Page.requested(request, "page", num_jobs)
    keys = None
    if group_key or text:
        keys = {group.cause.key for group in chosen_groups}
    jobs = index.newest(page.first, PAGE_ROWS, queue, keys)
    return {
        "queues": {name: count for name, count in num_failed.items() if count or name == queue},
        "queue": queue,
        "group": group_key,
        "cause": cause,
        "text": text,
        "groups": groups[:MAX_GROUPS],
        "num_groups": len(groups),
        "jobs": site.failed_rows.read(jobs),
        "num_jobs": num_jobs,
        "total": num_failed[queue] if queue else sum(num_failed.values()),
        "num_wrong": num_wrong,
        "has_stopped": has_stopped,
        "is_whole": index.is_whole,
        "num_known": index.num_jobs,
        "wrong": Remedy.CLIENT,
        "page": page,
    }
