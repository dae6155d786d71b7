"""RQ's queues, and how many of their jobs are where."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from redis import Redis

from jobs.common import stored
from jobs.common.rq_jobs import QUEUE_PREFIX, QUEUES_KEY, QueueKeys

PLACES = ("waiting", "executing", "scheduled", "deferred", "finished", "failed")


@dataclass(frozen=True)
class QueueCounts:
    """How many jobs of a queue are at each of PLACES; `due` are scheduled ones that nobody has queued yet."""

    name: str
    counts: dict[str, int]
    due: int


def queue_names(connection: Redis) -> list[str]:
    keys: Any = connection.smembers(QUEUES_KEY)
    return sorted(stored.text(key).removeprefix(QUEUE_PREFIX) for key in keys)


def count_queues(connection: Redis, names: Sequence[str]) -> list[QueueCounts]:
    moment, size = time.time(), len(PLACES) + 1
    with connection.pipeline(transaction=False) as pipe:
        for keys in map(QueueKeys, names):
            pipe.llen(keys.waiting)
            pipe.zcard(keys.started)
            pipe.zcard(keys.scheduled)
            pipe.zcard(keys.deferred)
            pipe.zcount(keys.finished, moment, "+inf")  # expired results stay until a worker cleans up
            pipe.zcard(keys.failed)
            pipe.zcount(keys.scheduled, "-inf", moment)
        found = pipe.execute()
    by_queue = (found[start : start + size] for start in range(0, len(found), size))
    return [
        QueueCounts(name, dict(zip(PLACES, counts, strict=True)), due)
        for name, (*counts, due) in zip(names, by_queue, strict=True)
    ]
