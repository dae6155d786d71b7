"""The page of what a search has found."""

from typing import Any
from urllib.parse import quote

from starlette.requests import Request

from tokenmill.dashboard.seen.search import search as search_redis
from tokenmill.dashboard.views.failed import READ_S
from tokenmill.dashboard.views.site import Moved, Site, with_failed

#: The most characters that are searched for.
MAX_CHARS = 200


def search(site: Site, request: Request) -> dict[str, Any]:
    """Show runs, workers, queues and errors that have a text; a whole id leads to its page. Parameters: q."""
    text = request.query_params.get("q", "").strip()[:MAX_CHARS]
    look = site.watcher.look()
    if text:
        site.failures.advance(with_failed(look.queues), READ_S)
    groups = site.failures.groups(text=text) if text else []
    found = search_redis(site.connection, text, look) if text else None
    if found is not None and found.job is not None:
        raise Moved(f"/jobs/{quote(found.job)}")
    if found is not None and [run for run, _ in found.runs] == [text]:
        raise Moved(f"/runs/{text}")
    return {"text": text, "found": found, "groups": groups, "is_whole": site.failures.is_whole}
