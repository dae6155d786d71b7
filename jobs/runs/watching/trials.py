"""A job of the command line's own, which is awaited and taken away again."""

import json
import time
from collections.abc import Mapping
from typing import Any
from uuid import uuid4

from redis import Redis

from jobs.common.keys import MODEL_FIELD
from jobs.common.rq_jobs import JobQueue, JobStatus, job_key, job_status, last_result, results_key
from jobs.common.workers import read_workers
from jobs.errors import TrialFailed
from jobs.runs.redis_state.run_jobs import read_earlier
from jobs.runs.watching.reading import failure_text
from jobs.runs.watching.words import no_worker_text

#: Between two looks, and before it is said that nobody listens.
POLL_S, PATIENCE_S = 0.05, 3.0

#: Tokenizing a large file takes a while; RQ's default is 3 minutes.
TIMEOUT_S = 3600

_OVER = {JobStatus.FINISHED, JobStatus.FAILED, JobStatus.STOPPED, JobStatus.CANCELED, None}


def try_job(
    connection: Redis, queue: str, function: str, arguments: Mapping[str, Any], model: str | None = None
) -> dict[str, Any]:
    """Return what a job gives. Raises TrialFailed, also where nobody listens."""
    job_id = f"trial-{uuid4().hex}"
    try:
        with connection.pipeline() as pipe:
            kept = dict.fromkeys(("timeout", "result_ttl", "failure_ttl"), TIMEOUT_S)
            named = {"kwargs": dict(arguments), "description": function, "job_id": job_id}
            JobQueue(connection, queue).enqueue(pipe, function, **named, **kept)
            if model is not None:
                pipe.hset(job_key(job_id), MODEL_FIELD, model)
            pipe.execute()
        heard_at = time.monotonic()
        while (status := job_status(connection.hget(job_key(job_id), "status"))) not in _OVER:
            listened = {name for each in read_workers(connection) for name in each.queues}
            if queue in listened:
                heard_at = time.monotonic()
            elif time.monotonic() - heard_at > PATIENCE_S:
                raise TrialFailed(no_worker_text(queue, sorted(listened)))
            time.sleep(POLL_S)
        if status is not JobStatus.FINISHED:
            raise TrialFailed(failure_text(connection, job_id))
        try:
            found: dict[str, Any] = json.loads(last_result(connection, job_id))
        except (ValueError, RecursionError):
            raise TrialFailed("its result cannot be read") from None
        return found
    finally:
        left = read_earlier(connection, [job_id])
        with connection.pipeline() as pipe:
            for job in left:
                job.delete(pipe)
            pipe.delete(results_key(job_id))
            pipe.execute()
