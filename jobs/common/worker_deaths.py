"""Records which workers died while they held jobs. The worker that takes over the jobs writes the record."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from redis import Redis

from jobs.common.display import safe_name
from jobs.common.keys import DEATHS_KEY
from jobs.common.stored import count, json_object, seconds

#: The most deaths that are kept. Earlier deaths are dropped.
MAX_DEATHS = 200
#: The most jobs that a record of a death names.
MAX_JOBS = 20
DEATHS_TTL_S = 30 * 24 * 3600


@dataclass(frozen=True)
class WorkerDeath:
    """A worker that died, was cut off or froze while it held jobs.

    at: when another worker took over the jobs, in Unix seconds. num_jobs: how many jobs the dead worker had begun.
    job_ids: the ids of some of these jobs.
    """

    worker: str
    at: float
    num_jobs: int
    job_ids: tuple[str, ...] = ()


def record_deaths(client: Redis, ids_by_worker: Mapping[str, Sequence[str]]) -> None:
    """Record that workers have died. ids_by_worker: by each worker's name, the ids of the jobs that it had begun."""
    if not ids_by_worker:
        return
    moment = time.time()
    entries = []
    for worker, job_ids in ids_by_worker.items():
        death = {
            "worker": worker,
            "at": moment,
            "num_jobs": len(job_ids),
            "jobs": list(job_ids[:MAX_JOBS]),
        }
        entries.append(json.dumps(death))
    with client.pipeline(transaction=False) as pipe:
        pipe.lpush(DEATHS_KEY, *entries)
        pipe.ltrim(DEATHS_KEY, 0, MAX_DEATHS - 1)
        pipe.expire(DEATHS_KEY, DEATHS_TTL_S)
        pipe.execute()


def read_deaths(connection: Redis) -> list[WorkerDeath]:
    """Return the last deaths, the latest first. The names of workers are safe to show. Raises RedisError."""
    entries: Any = connection.lrange(DEATHS_KEY, 0, MAX_DEATHS - 1)
    deaths = [_death(json_object(entry)) for entry in entries]
    return [death for death in deaths if death is not None]


def _death(fields: dict[str, Any]) -> WorkerDeath | None:
    """Return a recorded death; None if the record cannot be right."""
    worker = fields.get("worker")
    at = seconds(str(fields.get("at")))
    jobs = fields.get("jobs")
    if not isinstance(worker, str) or at is None or not isinstance(jobs, list):
        return None
    job_ids = tuple(job for job in jobs[:MAX_JOBS] if isinstance(job, str))
    num_jobs = count(fields.get("num_jobs")) or 0
    return WorkerDeath(safe_name(worker), at, num_jobs, job_ids)
