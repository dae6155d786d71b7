"""Workers as RQ's registration shows them; what ours tell of themselves is in their samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jobs.common.rq_jobs import WORKER_PREFIX, WORKERS_KEY

if TYPE_CHECKING:
    from redis import Redis

#: What is read of a worker's hash.
_FIELDS = ("state", "queues", "current_job", "successful_job_count", "failed_job_count", "last_heartbeat")


@dataclass(frozen=True)
class WorkerSeen:
    """A worker's name and the fields of its hash, as they are in Redis."""

    name: bytes
    fields: dict[str, bytes]


def list_workers(connection: Redis, names: Sequence[str] | None = None) -> list[WorkerSeen]:
    """Return the workers that live, by name: all, or those of `names`. What cannot be read is left out."""
    if names is None:
        members: Any = connection.smembers(WORKERS_KEY)
        keys = sorted(members)
    else:
        keys = [f"{WORKER_PREFIX}{name}".encode(errors="surrogatepass") for name in names]
    with connection.pipeline(transaction=False) as pipe:
        for key in keys:
            pipe.hmget(key, _FIELDS)
        replies = pipe.execute(raise_on_error=False)
    prefix = WORKER_PREFIX.encode()
    return [
        WorkerSeen(key.removeprefix(prefix), {k: v for k, v in zip(_FIELDS, reply, strict=True) if v})
        for key, reply in zip(keys, replies, strict=True)
        if not isinstance(reply, Exception) and any(reply)
    ]
