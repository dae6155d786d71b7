"""How many jobs are where in RQ's queues, counted by keys; the queues that runs are on."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jobs.common.keys import RQ
from jobs.common.rq_jobs import QUEUE_PREFIX, QUEUES_KEY, queue_keys
from jobs.runs.watching.snapshot import read_workers

if TYPE_CHECKING:
    from redis import Redis


#: Registries that are counted, by the name under which they are shown.
REGISTRIES = {
    "executing": "wip",
    "scheduled": "scheduled",
    "deferred": "deferred",
    "finished": "finished",
    "failed": "failed",
}


@dataclass(frozen=True)
class QueueCounts:
    """A queue's name and how many jobs are where; None where the key is not what RQ keeps there."""

    name: bytes
    counts: dict[str, int | None]


def queue_names(connection: Redis) -> list[bytes]:
    """Return the names of all queues that RQ knows."""
    prefix = QUEUE_PREFIX.encode()
    keys: Any = connection.smembers(QUEUES_KEY)
    return sorted(key.removeprefix(prefix) for key in keys)


def count_queues(connection: Redis, names: Sequence[bytes]) -> list[QueueCounts]:
    """Count the jobs of these queues, in one round trip and without RQ's cleanup. `waiting` comes first."""
    moment = time.time()
    with connection.pipeline(transaction=False) as pipe:
        for name in names:
            pipe.llen(QUEUE_PREFIX.encode() + name)
            for shown, key in REGISTRIES.items():
                # Results that have expired stay in the registry until a worker cleans it.
                oldest = moment if shown == "finished" else "-inf"
                pipe.zcount(f"{RQ}:{key}:".encode() + name, oldest, "+inf")
        replies = iter([None if isinstance(each, Exception) else each for each in pipe.execute(False)])
    return [QueueCounts(name, {shown: next(replies) for shown in ("waiting", *REGISTRIES)}) for name in names]


def count_due(connection: Redis, names: Sequence[bytes]) -> list[int | None]:
    """Count scheduled jobs of these queues whose time has come: no worker's scheduler has queued them yet.

    None where the key is not what RQ keeps there.
    """
    moment = time.time()
    with connection.pipeline(transaction=False) as pipe:
        for name in names:
            pipe.zcount(f"{RQ}:scheduled:".encode() + name, "-inf", moment)
        return [None if isinstance(each, Exception) else each for each in pipe.execute(False)]


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
