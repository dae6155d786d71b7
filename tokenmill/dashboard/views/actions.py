"""The page of the log of actions."""

from typing import Any

from starlette.requests import Request

from tokenmill.dashboard.actions.log import count_entries, read_entries
from tokenmill.dashboard.views.site import PAGE_ROWS, Page, Site


def actions(site: Site, request: Request) -> dict[str, Any]:
    """Show what people did in the dashboard, the latest first. Parameters: page."""
    total = count_entries(site.connection)
    page = Page.asked(request, "page", total)
    return {
        "entries": read_entries(site.connection, page.first, PAGE_ROWS),
        "total": total,
        "page": page,
    }
