"""Whether what waits in the queues can be read: a producer's mistake that only its jobs show."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from redis import Redis
from redis.exceptions import RedisError

from ..common.rq_jobs import QUEUE_PREFIX, job_key
from ..common.shown import safe_name
from ..common.stored import unpacked
from ..watch.queues import queue_names
from ..watch.strange_keys import listed
from .findings import Finding, fault, ok
from .redis_server import Server

#: Of how many queues, and of how many jobs at the front of each, the payload is looked at; up to which size.
MAX_QUEUES, MAX_JOBS, MAX_BYTES = 20, 5, 1 << 20


def check_queued_jobs(server: Server) -> Iterator[Finding]:
    """Look for payloads that are no JSON; none is loaded."""
    names = listed(queue_names, server.client)
    looked = 0
    for name in names[:MAX_QUEUES]:
        payloads = [_payload(server, each) for each in listed(partial(_oldest, name), server.client)]
        looked += len(payloads)
        strange = sum(each is not None and not each.startswith(b"[") for each in payloads)
        if strange:
            yield fault(
                "queues",
                f"queue {safe_name(name)}: {strange} of the {len(payloads)} oldest jobs are no JSON, RQ's "
                "default is pickle; a worker fails them unread",
                "enqueue with -S json, or Queue(..., serializer='json')",
            )
            return
    yield ok("queues", f"{len(names)} queues, the {looked} oldest jobs are JSON")


def _oldest(queue: bytes, client: Redis) -> list[bytes]:
    """Return the ids of the jobs at the front of a queue."""
    ids: Any = client.lrange(QUEUE_PREFIX.encode() + queue, -MAX_JOBS, -1)
    return list(ids)


def _payload(server: Server, job_id: bytes) -> bytes | None:
    """Return a job's payload; None for one that is gone, large or cannot be had."""
    try:
        key = job_key(job_id.decode(errors="surrogateescape")).encode(errors="surrogateescape")
        size: Any = server.client.hstrlen(key, "data")
        data: Any = server.client.hget(key, "data") if 0 < size <= MAX_BYTES else None
    except RedisError:
        return None
    return None if data is None else unpacked(data, 4 * MAX_BYTES)
