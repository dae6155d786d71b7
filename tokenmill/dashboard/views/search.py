"""The page of the results of a search."""

from typing import Any
from urllib.parse import quote

from starlette.requests import Request

from tokenmill.dashboard.failures.index import GroupSeen
from tokenmill.dashboard.seen.search import search as search_redis
from tokenmill.dashboard.views.failed import READ_S
from tokenmill.dashboard.views.site import Moved, Site, with_failed

#: The most characters of the searched text.
MAX_CHARS = 200


def search(site: Site, request: Request) -> dict[str, Any]:
    """Search runs, workers, queues and errors for a text. Parameters: q (the text).

    The whole id of a job or run leads to its page: then this function raises Moved.
    """
    text = request.query_params.get("q", "").strip()[:MAX_CHARS]
    look = site.watcher.look()
    groups: list[GroupSeen] = []
    found = None
    if text:
        site.failures.advance(with_failed(look.queues), READ_S)
        groups = site.failures.groups(text=text)
        found = search_redis(site.connection, text, look)
        if found.job is not None:
            raise Moved(f"/jobs/{quote(found.job)}")
        found_ids = [run_id for run_id, _ in found.runs]
        if found_ids == [text]:
            raise Moved(f"/runs/{text}")
    return {"text": text, "found": found, "groups": groups, "is_whole": site.failures.is_whole}
