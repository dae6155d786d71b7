"""The workers that listen on queues."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from redis import Redis

from jobs.common import rq_jobs, stored
from jobs.common.keys import SILENT_S, WORKER_STATS_TTL_S, worker_key

#: For how long what a worker told lately is kept at least.
TOLD_LATELY_S = WORKER_STATS_TTL_S - SILENT_S


class Listener(NamedTuple):
    """A worker that listens on queues, what it told last, and whether that was long ago: it was killed perhaps."""

    name: str
    queues: list[str]
    told: dict[str, Any]
    is_silent: bool


def living_workers(connection: Redis) -> list[Listener]:
    """Return the workers that Redis has; RQ's list of a queue's is not asked, as producers could then write it."""
    keys: Any = connection.smembers(rq_jobs.WORKERS_KEY)
    names = [stored.text(key).removeprefix(rq_jobs.WORKER_PREFIX) for key in keys]
    with connection.pipeline(transaction=False) as pipe:
        for key, name in zip(keys, names, strict=True):
            pipe.hget(key, "queues")  # a killed worker's own key expires, its entry in the set stays
            pipe.get(worker_key(name))
            pipe.ttl(worker_key(name))
        replies = pipe.execute(raise_on_error=False)
    return [
        Listener(name, stored.text(queues).split(","), stored.json_object(told), 0 <= left_s < TOLD_LATELY_S)
        for name, queues, told, left_s in zip(names, replies[::3], replies[1::3], replies[2::3], strict=True)
        if isinstance(queues, bytes)
    ]


def served_on(workers: Iterable[Listener], queue: str) -> tuple[int, set[str] | None]:
    """Return how many of the workers listen on a queue, and all names of the models they serve, if all say that."""
    listening = [each for each in workers if queue in each.queues]
    if any(each.told == {} for each in listening):
        return len(listening), None
    # A killed worker's key lives on for minutes, and what it served with it.
    served = [each.told.get("models") for each in listening if not each.is_silent]
    models = {name for names in served if isinstance(names, list) for name in names if isinstance(name, str)}
    return len(listening), models
