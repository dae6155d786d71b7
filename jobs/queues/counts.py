"""Counts the jobs of RQ's queues, and reads how long the first job of each queue has waited."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from redis import Redis

from jobs.common import rq_jobs, stored
from jobs.common.keys import FAR_S, held_key

#: Where a job of a queue can be.
PLACES = ("waiting", "executing", "scheduled", "deferred", "finished", "failed")


@dataclass(frozen=True)
class QueueCounts:
    """How many jobs a queue has.

    counts: the number of jobs at each of PLACES, such as "waiting". due: the number of scheduled jobs that are due, but
    not queued yet.
    """

    name: str
    counts: dict[str, int]
    due: int


def queue_names(connection: Redis) -> list[str]:
    """Return the names of all queues, sorted."""
    keys: Any = connection.smembers(rq_jobs.QUEUES_KEY)
    return sorted(stored.text(key).removeprefix(rq_jobs.QUEUE_PREFIX) for key in keys)


def count_queues(connection: Redis, names: Sequence[str]) -> list[QueueCounts]:
    """Count the jobs of some queues, in one round trip."""
    moment = time.time()
    with connection.pipeline(transaction=False) as pipe:
        for keys in map(rq_jobs.QueueKeys, names):
            # One reply for each of PLACES, in their order, and then one for the due jobs.
            pipe.llen(keys.waiting)
            pipe.zcard(keys.started)
            pipe.zcard(keys.scheduled)
            pipe.zcard(keys.deferred)
            # Only results that have not expired are counted. Expired results stay until a worker cleans up.
            pipe.zcount(keys.finished, moment, "+inf")
            pipe.zcard(keys.failed)
            pipe.zcount(keys.scheduled, "-inf", moment)
        replies = iter(pipe.execute())

    queues = []
    for name in names:
        counts = {place: next(replies) for place in PLACES}
        num_due = next(replies)
        queues.append(QueueCounts(name, counts, num_due))
    return queues


def count_claimed(connection: Redis, names: Sequence[str]) -> dict[str, int]:
    """Count the jobs of each queue that workers have taken and not begun. Needs the workers' Redis user.

    When Redis is full, workers cannot record that a job has begun. Then all jobs that workers hold are counted.
    """
    # In the registry of started jobs, the score of a job that has begun is a time plus FAR_S. The scores of other jobs
    # lie near the present time.
    lowest_score_of_begun = time.time() + FAR_S / 2
    with connection.pipeline(transaction=False) as pipe:
        for name in names:
            pipe.hlen(held_key(name))
            pipe.zcount(rq_jobs.QueueKeys(name).started, lowest_score_of_begun, "+inf")
        replies = iter(pipe.execute())

    num_claimed = {}
    for name in names:
        num_held = next(replies)
        num_begun = next(replies)
        num_claimed[name] = max(0, num_held - num_begun)
    return num_claimed


def head_ages(connection: Redis, names: Sequence[str], now: float) -> dict[str, float]:
    """Return how long the job at the head of each queue has waited, in seconds; 0 for an empty queue.

    A queue is left out if the time at which its first job was enqueued cannot be read. now: Unix seconds.
    """
    with connection.pipeline(transaction=False) as pipe:
        for name in names:
            pipe.lrange(rq_jobs.QueueKeys(name).waiting, 0, 0)
        # A producer may have written a value of another type to a queue's key. Then only that queue is left out.
        replies = pipe.execute(raise_on_error=False)
        # One entry per queue: [id of the first job]; [] for an empty queue; None for a queue that cannot be read.
        heads = [reply if isinstance(reply, list) else None for reply in replies]
        for head in heads:
            if head:
                first_job_id = stored.text(head[0])
                pipe.hget(rq_jobs.job_key(first_job_id), "enqueued_at")
        times = iter(pipe.execute(raise_on_error=False))  # one per queue that has a first job

    ages: dict[str, float] = {}
    for name, head in zip(names, heads, strict=True):
        if head is None:
            continue
        if not head:
            ages[name] = 0.0
            continue
        enqueued_at = stored.moment(next(times))
        if enqueued_at is not None:
            ages[name] = max(0.0, now - enqueued_at)
    return ages
