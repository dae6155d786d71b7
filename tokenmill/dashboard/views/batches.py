"""The page of batches."""

from collections import Counter
from typing import Any

from starlette.requests import Request

from jobs.runs.watching.api_records import (
    batch_runs,
    batch_status,
    recorded_batches,
    recorded_limits,
)
from tokenmill.dashboard.views.site import PAGE_ROWS, Missing, Page, Site


def batches(site: Site, request: Request) -> dict[str, Any]:
    """Read the batches of the API servers, the latest first, and the refusals of projects at their limits.

    Parameters: project (all projects by default), page.
    """
    connection = site.connection
    recorded = recorded_batches(connection)
    projects = Counter(batch.project for batch in recorded)
    project = request.query_params.get("project", "")
    if project and project not in projects:
        raise Missing("There is no batch of this project.")
    chosen = [batch for batch in recorded if project in ("", batch.project)]
    page = Page.requested(request, "page", len(chosen))
    shown = chosen[page.first : page.first + PAGE_ROWS]
    runs = batch_runs(connection, shown)

    rows = []
    for batch in shown:
        snapshot = runs.get(batch.run)
        status = "unknown" if snapshot is None else batch_status(snapshot)
        rows.append((batch, status, snapshot))
    return {
        "project": project,
        "projects": dict(sorted(projects.items())),
        "total": len(recorded),
        "batches": rows,
        "limits": recorded_limits(connection),
        "page": page,
    }
