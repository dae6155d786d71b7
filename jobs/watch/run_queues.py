"""The queues that runs' jobs are on, as far as runs are told of by them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jobs.common.rq_jobs import queue_keys
from jobs.runs.watching.snapshot import read_workers

if TYPE_CHECKING:
    from redis import Redis


#: Entries that are read of a queue's registry of running or failed jobs.
MAX_ENTRIES = 20_000


@dataclass(frozen=True)
class RunQueue:
    """What runs of one queue share."""

    started: Sequence[bytes] = ()
    failed: Sequence[bytes] = ()
    length: int = 0
    workers: int = 0
    models: Collection[str] | None = None


NO_QUEUE = RunQueue()


def read_queues(connection: Redis, names: Iterable[str], used: Collection[str]) -> dict[str, RunQueue]:
    """used: those on which jobs of a run may be; of the others only the workers matter."""
    found = {}
    for name in names:
        keys, most = queue_keys(name), MAX_ENTRIES if name in used else 1
        with connection.pipeline(transaction=False) as pipe:
            pipe.zrange(keys.started, 0, most - 1)
            pipe.zrevrange(keys.failed, 0, most - 1)
            pipe.llen(keys.waiting)
            pipe.llen(keys.popped)
            pipe.smembers(keys.workers)
            started, failed, waiting, popped, workers = [
                () if isinstance(each, Exception) else each for each in pipe.execute(raise_on_error=False)
            ]
        num_workers, models = read_workers(connection, workers)
        found[name] = RunQueue(started, failed, (waiting or 0) + (popped or 0), num_workers, models)
    return found
