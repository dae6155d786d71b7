"""The page of what a search has found."""

from typing import Any

from starlette.requests import Request

from tokenmill.dashboard.seen.search import search as search_redis
from tokenmill.dashboard.views.failed import READ_S
from tokenmill.dashboard.views.site import Site, with_failed

#: The most characters that are searched for.
MAX_CHARS = 200


def search(site: Site, request: Request) -> dict[str, Any]:
    """Show jobs, runs, workers, queues and errors that have a text. Parameters: q."""
    text = request.query_params.get("q", "").strip()[:MAX_CHARS]
    look = site.watcher.look()
    if text:
        site.failures.advance(with_failed(look.queues), READ_S)
    groups = site.failures.groups(text=text) if text else []
    return {
        "text": text,
        "found": search_redis(site.connection, text, look) if text else None,
        "groups": groups,
        "is_whole": site.failures.is_whole,
    }
