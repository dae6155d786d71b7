"""What each page shows, read from Redis."""

from collections import Counter
from collections.abc import Callable
from typing import Any

from starlette.requests import Request

from jobs.common.display import safe_name
from jobs.errors import UnknownRun
from jobs.queues import count_queues, queue_names
from jobs.runs.plans.names import is_run_id
from jobs.runs.watching.api_records import (
    batch_runs,
    batch_status,
    recorded_batches,
    recorded_limits,
)
from jobs.runs.watching.reading import read_planned, run_reasons
from jobs.runs.watching.snapshot import RunSnapshot, obstacles
from tokenmill.dashboard import display
from tokenmill.dashboard.seen.jobs_seen import failed_page, read_job
from tokenmill.dashboard.seen.shards_seen import list_shards
from tokenmill.dashboard.watcher import Watcher

#: Rows of a table on one page.
PAGE_ROWS = 50

#: Shards of a run on one page.
PAGE_SHARDS = 100


class Missing(Exception):
    """There is no such thing to be shown; its text says what."""


def time_left(run: RunSnapshot) -> str:
    """How long a run still takes: as its shards tell, else at the pace so far."""
    if run.is_active and run.left_s is not None:
        return f"about {display.duration(run.left_s)}"
    if not run.is_active or not run.rows or not run.rows_per_s or not run.rows_done:
        return display.NOTHING
    return f"about {display.duration((run.rows - run.rows_done) / run.rows_per_s)}"


def overview(watcher: Watcher, request: Request, **_: Any) -> dict[str, Any]:
    """Everything at a glance. Parameters: workers (page of the workers' table)."""
    look = watcher.look()
    first, page = _page(request, "workers", len(look.workers), PAGE_ROWS)
    return {
        "look": look,
        "workers": look.workers[first : first + PAGE_ROWS],
        "workers_page": page,
        "workers_pages": _pages(len(look.workers), PAGE_ROWS),
    }


def failed(watcher: Watcher, request: Request, **_: Any) -> dict[str, Any]:
    """The failed jobs of a queue. Parameters: queue (the one with most, where not given), page."""
    connection = watcher.connection
    counted = count_queues(connection, queue_names(connection)[:200])
    counts = {each.name: each.counts["failed"] for each in counted}
    most = max(counts, key=lambda name: counts[name], default="")
    queue = request.query_params.get("queue", most)
    if queue not in counts and queue:
        raise Missing("There is no queue of this name.")
    first, page = _page(request, "page", counts.get(queue, 0), PAGE_ROWS)
    return {
        "queues": {name: count for name, count in counts.items() if count or name == queue},
        "queue": queue,
        "total": counts.get(queue, 0),
        "jobs": failed_page(connection, queue, first, PAGE_ROWS) if queue else [],
        "page": page,
        "pages": _pages(counts.get(queue, 0), PAGE_ROWS),
    }


def batches(watcher: Watcher, request: Request, **_: Any) -> dict[str, Any]:
    """Show the API servers' batches, the latest first, and which projects were limited.

    Parameters: project (every one, if none is given), page.
    """
    connection = watcher.connection
    recorded = recorded_batches(connection)
    projects = Counter(batch.project for batch in recorded)
    project = request.query_params.get("project", "")
    if project and project not in projects:
        raise Missing("There is no batch of this project.")
    chosen = [batch for batch in recorded if project in ("", batch.project)]
    first, page = _page(request, "page", len(chosen), PAGE_ROWS)
    shown = chosen[first : first + PAGE_ROWS]
    runs = batch_runs(connection, shown)

    rows = []
    for batch in shown:
        snapshot = runs.get(batch.run)
        rows.append((batch, "unknown" if snapshot is None else batch_status(snapshot), snapshot))
    return {
        "project": project,
        "projects": dict(sorted(projects.items())),
        "total": len(recorded),
        "batches": rows,
        "limits": recorded_limits(connection),
        "page": page,
        "pages": _pages(len(chosen), PAGE_ROWS),
    }


def run(watcher: Watcher, request: Request, **_: Any) -> dict[str, Any]:
    """One run. Parameters: shards (page of the shards' table)."""
    name = request.path_params["run"]
    if not is_run_id(name):
        raise Missing("A run's id has another form.")
    try:
        snapshot = read_planned(watcher.connection, name)
        total = snapshot.shards or 0
        first, page = _page(request, "shards", total, PAGE_SHARDS)
        shards = list_shards(watcher.connection, snapshot.run, first, PAGE_SHARDS) if total else []
        waits = obstacles(watcher.connection, snapshot)
    except UnknownRun:
        raise Missing("Redis does not know this run, or no longer.") from None
    return {
        "run": snapshot,
        "reasons": run_reasons(watcher.connection, snapshot.run),
        "waits": [safe_name(each, 500) for each in waits],
        "shards": shards,
        "shards_page": page,
        "shards_pages": _pages(total, PAGE_SHARDS),
    }


def job(watcher: Watcher, request: Request, *, show_prompts: bool) -> dict[str, Any]:
    """One job."""
    job_id = request.path_params["job_id"]
    found = read_job(watcher.connection, job_id, with_arguments=show_prompts)
    if found is None:
        raise Missing("Redis does not know this job: it has expired, or was deleted.")
    run, _, rest = job_id.partition("-")
    return {
        "job": found,
        "shown_id": safe_name(job_id),
        "show_prompts": show_prompts,
        "run": run if is_run_id(run) and (rest == "plan" or rest.isdigit()) else None,
    }


def missing(watcher: Watcher, request: Request, **_: Any) -> dict[str, Any]:
    """No page of ours."""
    raise Missing("There is no such page.")


PAGES: dict[str, Callable[..., dict[str, Any]]] = {
    each.__name__: each for each in (overview, failed, batches, run, job, missing)
}


def _page(request: Request, name: str, num_rows: int, rows: int) -> tuple[int, int]:
    """Return the first row of the page that is asked for, and its number from 1 on, within what there is."""
    asked = request.query_params.get(name, "1")
    number = int(asked) if asked.isascii() and asked.isdigit() and len(asked) < 9 else 1
    number = max(1, min(number, _pages(num_rows, rows)))
    return (number - 1) * rows, number


def _pages(num_rows: int, rows: int) -> int:
    return max(1, -(-num_rows // rows))
