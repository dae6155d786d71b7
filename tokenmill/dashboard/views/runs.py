"""The pages of runs."""

from collections.abc import Iterable
from typing import Any

from starlette.requests import Request

from jobs.common.display import safe_name
from jobs.errors import UnknownRun
from jobs.runs.plans.names import is_run_id
from jobs.runs.watching.reading import read_planned, run_reasons
from jobs.runs.watching.snapshot import STATES, RunSnapshot, left_text, needs, obstacles
from tokenmill.dashboard import display
from tokenmill.dashboard.seen.run_asked import read_arguments
from tokenmill.dashboard.seen.runs_seen import MAX_RUNS
from tokenmill.dashboard.seen.shards_seen import list_shards
from tokenmill.dashboard.views.site import PAGE_ROWS, Missing, Page, Site

#: The shards of a run on one page of their table.
PAGE_SHARDS = 100


def time_left(run: RunSnapshot) -> str:
    """Return how long a run is expected to go on, as `tokenmill status` prints it; a dash if that is not known."""
    return left_text(run) or display.NOTHING


def running_first(runs: Iterable[RunSnapshot]) -> list[RunSnapshot]:
    """Return the active runs first, then all other runs. Each group keeps the given order."""
    return sorted(runs, key=lambda run: not run.is_active)


def why(run: RunSnapshot) -> str:
    """Return why a run is in its state, or what it waits for; "" if there is nothing to say."""
    if run.plan_error is not None and not run.finished and not run.cancelled:
        return f"planning failed: {run.plan_error}"
    if run.stopped is not None:
        return run.stopped
    if run.finished and not run.is_planning:
        return run.too_many_errors or ""
    if run.shards_failed:
        return f"{run.shards_failed:,} of its shards failed"
    unmet = needs(run)
    if not unmet:
        return ""
    return f"waits: {safe_name(unmet[0], 500)}"


def runs(site: Site, request: Request) -> dict[str, Any]:
    """Read the runs that were submitted last. Parameters: state (any by default), page."""
    snapshots = running_first(site.runs.newest())
    state = request.query_params.get("state", "")
    counts = dict.fromkeys(STATES, 0)
    for snapshot in snapshots:
        counts[snapshot.state] += 1
    chosen = [snapshot for snapshot in snapshots if state in ("", snapshot.state)]
    page = Page.requested(request, "page", len(chosen))
    return {
        "runs": chosen[page.first : page.first + PAGE_ROWS],
        "state": state,
        "states": {name: count for name, count in counts.items() if count or name == state},
        "total": len(snapshots),
        "is_cut": len(snapshots) == MAX_RUNS,
        "page": page,
    }


def run(site: Site, request: Request) -> dict[str, Any]:
    """Read one run. Parameters: shards (the page of the shards' table)."""
    connection = site.connection
    name = request.path_params["run"]
    if not is_run_id(name):
        raise Missing("This is not the id of a run.")
    try:
        snapshot = read_planned(connection, name)
        num_shards = snapshot.shards or 0
        page = Page.requested(request, "shards", num_shards, PAGE_SHARDS)
        shards = []
        if num_shards:
            shards = list_shards(connection, snapshot.run, page.first, PAGE_SHARDS)
        waits = obstacles(connection, snapshot)
    except UnknownRun:
        raise Missing("Redis does not know this run. It may have expired.") from None
    return {
        "run": snapshot,
        "asked": read_arguments(connection, snapshot, with_prompts=site.show_prompts),
        "show_prompts": site.show_prompts,
        "reasons": run_reasons(connection, snapshot.run),
        "waits": [safe_name(text, 500) for text in waits],
        "shards": shards,
        "shards_page": page,
    }
