"""The page of the log of actions."""

from typing import Any

from starlette.requests import Request

from tokenmill.dashboard.actions.log import count_entries, read_entries
from tokenmill.dashboard.views.site import PAGE_ROWS, Missing, Page, Site, if_allowed


def actions(site: Site, request: Request) -> dict[str, Any]:
    """Read a page of the log of actions, the latest first. Parameters: page."""
    total = if_allowed(lambda: count_entries(site.connection), None)
    if total is None:
        raise Missing(
            "This Redis user may not read the log of actions: give it the rules of `dashboard` in ops/redis-users.acl."
        )
    page = Page.requested(request, "page", total)
    return {
        "entries": read_entries(site.connection, page.first, PAGE_ROWS),
        "total": total,
        "page": page,
    }
