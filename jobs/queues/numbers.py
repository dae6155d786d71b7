"""Reads the numbers of queues and of Redis that alerts and scaling use."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from redis import Redis
from redis.exceptions import ResponseError

from jobs.common.redis_info import RedisHealth, redis_health
from jobs.common.workers import claimed_jobs, read_workers
from jobs.queues.counts import count_queues, head_ages
from jobs.runs.watching.reading import read_at_risk

#: RQ's name for each of PLACES that RQ names differently.
_STATUSES = {"waiting": "queued", "executing": "started"}


@dataclass(frozen=True)
class QueueNumbers:
    """The numbers of some queues and of their Redis at one moment. All mappings are by queue.

    jobs: the number of jobs, by status. due: the number of scheduled jobs whose time has come, but that nobody has
    queued yet. head_ages: see `head_ages`.
    at_risk: the number of runs that are not expected to end before their deadline.
    redis: the state of Redis; None if Redis does not let this user ask for it.
    """

    jobs: Mapping[str, Mapping[str, int]]
    due: Mapping[str, int]
    head_ages: Mapping[str, float]
    at_risk: Mapping[str, int]
    redis: RedisHealth | None


def read_numbers(connection: Redis, queues: Sequence[str]) -> QueueNumbers:
    """Return the numbers of these queues. Raises RedisError."""
    queue_counts = count_queues(connection, queues)
    claimed_by_queue = claimed_jobs(read_workers(connection))
    jobs: dict[str, dict[str, int]] = {}
    for queue in queue_counts:
        by_status = {"claimed": claimed_by_queue.get(queue.name, 0)}
        for place, count in queue.counts.items():
            status = _STATUSES.get(place, place)  # _STATUSES has only the names that differ
            by_status[status] = count
        jobs[queue.name] = by_status

    at_risk_by_queue = Counter(run.queue for run in read_at_risk(connection))
    return QueueNumbers(
        jobs=jobs,
        due={queue.name: queue.due for queue in queue_counts},
        head_ages=head_ages(connection, queues, time.time()),
        at_risk={name: at_risk_by_queue[name] for name in queues},
        redis=_read_health(connection),
    )


def _read_health(connection: Redis) -> RedisHealth | None:
    """Return the state of Redis; None if Redis does not let this user ask for it."""
    try:
        info: Any = connection.info()
    except ResponseError:
        return None
    return redis_health(info)
