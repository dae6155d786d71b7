"""Whether the keys that jobs share are of their types: somebody else may have written there."""

from __future__ import annotations

from collections.abc import Iterator

from redis import Redis

from jobs.doctor.findings import Finding, fault, ok
from jobs.watch.queues import queue_names
from jobs.watch.strange_keys import listed, strange_keys

#: The keys of so many queues are looked at; of so many keys a fault is told.
MAX_QUEUES, MAX_TOLD = 1000, 20


def check_shared_keys(client: Redis) -> Iterator[Finding]:
    """Name the keys of RQ and ours, shared by all jobs or by those of a queue, that are of another type."""
    found = strange_keys(client, listed(queue_names, client)[:MAX_QUEUES])
    yield from (
        fault("keys", f"{each.problem}: somebody else wrote it", each.mend) for each in found[:MAX_TOLD]
    )
    if not found:
        yield ok("keys", "those that jobs share are of their types")
