"""Prompt jobs written to Redis as `rq enqueue` writes them, many at once: RQ itself makes 3,000 a second."""

from __future__ import annotations

import json
import socket
import zlib
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from redis import Redis
from rq.job import Job, JobStatus
from rq.serializers import JSONSerializer
from rq.utils import utcformat

CHUNK = 1000


def enqueue_raw(
    url: str, queue: str, ids: Sequence[str], prompt: str = "prompt", at_front: bool = False
) -> None:
    """Enqueue one `jobs.complete` of one token for each id, with the prompt `<prompt> <id>`.

    url: unix://..., the server's socket.
    """
    with Redis.from_url(url) as redis:
        fields = _fields(redis, queue)
        redis.sadd("rq:queues", f"rq:queue:{queue}")
    with connected(url) as server:
        for start in range(0, len(ids), CHUNK):
            chunk = ids[start : start + CHUNK]
            server.sendall(b"".join(_commands(chunk, queue, fields, prompt, at_front)) + END)
            read_to(server)


def job_ids(queue: str, number: int, first: int = 0) -> list[str]:
    """Ids of one length, which tell the queue and the job's place in it."""
    return [f"{queue}-{n:08d}" for n in range(first, first + number)]


def connected(url: str) -> socket.socket:
    """A bare connection to the server at a unix socket."""
    server = socket.socket(socket.AF_UNIX)
    server.connect(url.removeprefix("unix://"))
    return server


def command(*parts: bytes) -> bytes:
    """A command as it goes over the wire."""
    body = b"".join(b"$%d\r\n%b\r\n" % (len(part), part) for part in parts)
    return b"*%d\r\n%b" % (len(parts), body)


_END = b"end-of-replies"
END = command(b"ECHO", _END)
"""Sent behind commands, it tells where their replies end without a look at them."""
_ANSWER = b"$%d\r\n%b\r\n" % (len(_END), _END)


def read_to(server: socket.socket) -> None:
    """Read replies, without keeping them, up to the mark. Raises RuntimeError where the first is an error."""
    tail = b""
    while tail != _ANSWER:
        got = server.recv(1 << 20)
        if not got or (not tail and got.startswith(b"-")):
            raise RuntimeError(f"Redis answered {got[:300]!r}")
        tail = (tail + got)[-len(_ANSWER) :]


def _fields(redis: Redis, queue: str) -> dict[str, Any]:
    """What RQ writes of such a job, but for what differs from job to job."""
    job = Job.create(
        "jobs.complete",
        args=("",),
        kwargs={"max_tokens": 1},
        timeout=-1,
        result_ttl=-1,
        status=JobStatus.QUEUED,
        origin=queue,
        connection=redis,
        serializer=JSONSerializer,
    )
    job.enqueued_at = datetime.now(UTC)
    found = {**job.to_dict(), "enqueued_at": utcformat(job.enqueued_at)}
    return {name: value for name, value in found.items() if name not in ("data", "description")}


def _commands(
    ids: Sequence[str], queue: str, fields: dict[str, Any], prompt: str, at_front: bool
) -> Iterator[bytes]:
    constant = [_bytes(item) for pair in fields.items() for item in pair]
    for job_id in ids:
        text = f"{prompt} {job_id}"
        call = json.dumps(["jobs.complete", None, [text], {"max_tokens": 1}], separators=(",", ":"))
        data = zlib.compress(call.encode())
        description = f"jobs.complete('{text}', max_tokens=1)".encode()
        key = f"rq:job:{job_id}".encode()
        yield command(b"HSET", key, *constant, b"data", data, b"description", description)
    yield command(b"LPUSH" if at_front else b"RPUSH", f"rq:queue:{queue}".encode(), *map(str.encode, ids))


def _bytes(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    return (value if isinstance(value, str) else str(value)).encode()  # a JobStatus is a str
