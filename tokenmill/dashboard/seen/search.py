"""Searches jobs, runs, workers and queues for a text."""

from dataclasses import dataclass
from typing import Any

from redis import Redis

from jobs.common import rq_jobs, stored
from jobs.common.display import MAX_TEXT_CHARS, safe_name
from jobs.common.keys import RUNS_KEY, run_key
from jobs.runs.plans.names import is_run_id
from tokenmill.dashboard.seen.watcher import Look

#: The most runs that are searched: those that were submitted last.
MAX_RUNS = 2000
#: The most runs, the most workers and the most queues that are found.
MAX_FOUND = 50


@dataclass(frozen=True)
class Found:
    """The results of a search. job: the text, if it is the id of a job. runs: (run id, output folder), safe to show.

    workers, queues: names.
    """

    job: str | None
    runs: tuple[tuple[str, str], ...]
    workers: tuple[str, ...]
    queues: tuple[str, ...]


def search(connection: Redis, text: str, look: Look) -> Found:
    """Return what a text finds: a job by its whole id, runs by the beginning of their id or by their output folder.

    Workers and queues are found by any part of their name. Upper and lower case are the same, except in a job's id.
    Raises RedisError. look: the workers and queues to search.
    """
    wanted = text.lower()
    workers = [row.name for row in look.workers if wanted in row.name.lower()]
    queues = [queue.name for queue in look.queues if wanted in queue.name.lower()]
    is_job: Any = connection.exists(rq_jobs.job_key(text))
    return Found(
        job=text if is_job else None,
        runs=tuple(_find_runs(connection, wanted)[:MAX_FOUND]),
        workers=tuple(workers[:MAX_FOUND]),
        queues=tuple(queues[:MAX_FOUND]),
    )


def _find_runs(connection: Redis, wanted: str) -> list[tuple[str, str]]:
    """Return (run id, output folder) of runs whose id begins with a text, or whose folder contains it."""
    newest: Any = connection.zrevrange(RUNS_KEY, 0, MAX_RUNS - 1)
    run_ids = [run for run in map(stored.text, newest) if is_run_id(run)]
    # An older run is found by its whole id.
    if is_run_id(wanted) and wanted not in run_ids:
        run_ids.append(wanted)
    with connection.pipeline(transaction=False) as pipe:
        for run in run_ids:
            pipe.hget(run_key(run), "output")
        # A key may hold a value of another type, which a producer has written.
        replies = pipe.execute(raise_on_error=False)
    found = []
    for run, output in zip(run_ids, replies, strict=True):
        if not isinstance(output, bytes):
            continue
        folder = safe_name(output, MAX_TEXT_CHARS)
        if run.startswith(wanted) or wanted in folder.lower():
            found.append((run, folder))
    return found
