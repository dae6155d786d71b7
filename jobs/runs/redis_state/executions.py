"""Which workers hold jobs. RQ's executions tell: a job that waits inside a worker still says "queued"."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from redis import Redis

from jobs.common.keys import SILENT_S, WORKER_STATS_TTL_S, worker_key
from jobs.common.rq_jobs import execution_key, executions_key
from jobs.common.stored import text

#: Jobs that are looked up in one round trip.
_CHUNK = 1000


@dataclass(frozen=True)
class Holder:
    """An execution whose lease runs, and its worker's name. is_ours: whether that is one of Tokenmill's."""

    job_id: str
    execution_id: str
    worker: str
    is_ours: bool


def read_holders(connection: Redis, job_ids: Sequence[str]) -> list[Holder]:
    """Return the executions that hold some of the jobs."""
    with connection.pipeline(transaction=False) as pipe:
        for job_id in job_ids:
            pipe.zrange(executions_key(job_id), 0, -1)
        held = [
            (job_id, text(execution))
            for job_id, executions in zip(job_ids, pipe.execute(), strict=True)
            for execution in executions
        ]
        for job_id, execution in held:
            pipe.hget(execution_key(job_id, execution), "worker_name")
        names = [text(name) if name else "" for name in pipe.execute()]
        for name in names:
            pipe.exists(worker_key(name))
        tell = pipe.execute()
    return [
        Holder(job_id, execution, name, bool(is_ours))
        for (job_id, execution), name, is_ours in zip(held, names, tell, strict=True)
        if name
    ]


def silent_workers(connection: Redis, names: Iterable[str]) -> set[str]:
    """Return those of our workers that have told nothing of themselves lately: killed ones, most likely."""
    asked = sorted(set(names))
    with connection.pipeline(transaction=False) as pipe:
        for name in asked:
            pipe.ttl(worker_key(name))
        left = pipe.execute()
    return {name for name, left_s in zip(asked, left, strict=True) if 0 <= left_s < WORKER_STATS_TTL_S - SILENT_S}


def num_held(connection: Redis, job_ids: Iterable[str]) -> int:
    """Return how many of the jobs a worker holds, begun or not."""
    left, found = iter(job_ids), 0
    while chunk := [executions_key(job_id) for job_id in islice(left, _CHUNK)]:
        found += int(connection.exists(*chunk))
    return found
