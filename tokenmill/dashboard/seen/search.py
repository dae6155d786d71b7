"""Finds jobs, runs, workers and queues by a text."""

from dataclasses import dataclass
from typing import Any

from redis import Redis

from jobs.common import rq_jobs, stored
from jobs.common.display import MAX_TEXT_CHARS, safe_name
from jobs.common.keys import RUNS_KEY, run_key
from jobs.runs.plans.names import is_run_id
from tokenmill.dashboard.seen.watcher import Look

#: The most runs whose folders are looked through, the last submitted ones.
MAX_RUNS = 2000
#: The most things of a kind that are found.
MAX_FOUND = 50


@dataclass(frozen=True)
class Found:
    """What has a text. job: the id of a job, if the text is one. runs: ids with folders, safe to show."""

    job: str | None
    runs: tuple[tuple[str, str], ...]
    workers: tuple[str, ...]
    queues: tuple[str, ...]


def search(connection: Redis, text: str, look: Look) -> Found:
    """Return what has a text: a job or run by its whole id, else runs by their folders. Raises RedisError."""
    wanted = text.lower()
    workers = [row.name for row in look.workers if wanted in row.name.lower()]
    queues = [queue.name for queue in look.queues if wanted in queue.name.lower()]
    job_status: Any = connection.exists(rq_jobs.job_key(text))
    return Found(
        text if job_status else None,
        tuple(_runs(connection, wanted)[:MAX_FOUND]),
        tuple(workers[:MAX_FOUND]),
        tuple(queues[:MAX_FOUND]),
    )


def _runs(connection: Redis, wanted: str) -> list[tuple[str, str]]:
    """Return runs whose id begins with a text, or whose folder has it."""
    newest: Any = connection.zrevrange(RUNS_KEY, 0, MAX_RUNS - 1)
    run_ids = [run for run in map(stored.text, newest) if is_run_id(run)]
    if is_run_id(wanted) and wanted not in run_ids:
        run_ids.append(wanted)
    with connection.pipeline(transaction=False) as pipe:
        for run in run_ids:
            pipe.hget(run_key(run), "output")
        # Anybody may have put another kind of value there.
        replies = pipe.execute(raise_on_error=False)
    found = []
    for run, output in zip(run_ids, replies, strict=True):
        if not isinstance(output, bytes):
            continue
        folder = safe_name(output, MAX_TEXT_CHARS)
        if run.startswith(wanted) or wanted in folder.lower():
            found.append((run, folder))
    return found
