"""Failed jobs with their errors, within bounds: a queue may have many thousands, written by anybody."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from jobs.common import stored
from jobs.common.display import printable, safe_name
from jobs.common.rq_jobs import (
    JOB_PREFIX,
    JobStatus,
    dependency_ids,
    error_text,
    job_status,
    queue_keys,
    relatives_keys,
    results_key,
)
from jobs.errors import fault_line
from jobs.runs.watching.snapshot import error_line
from jobs.watch.job_actions import CANCELLABLE

if TYPE_CHECKING:
    from redis import Redis

#: A job's payload and meta are read up to so many bytes, packed and unpacked.
MAX_PAYLOAD_BYTES = 1 << 16

#: Of an error, such as a traceback, as much of its end is shown.
MAX_ERROR_CHARS = 20_000

#: Entries of stopped jobs that are passed over where the newest failed ones are looked for: a cancel of a run
#: may have made many.
MAX_STOPPED = 100

#: Of a job's dependencies, and of its dependents, so many are shown.
MAX_RELATIVES = 20

#: A job's name among messages: the class of an error, at the beginning of its last line.
_CLASS = re.compile(r"(?:[A-Za-z_]\w*\.)*([A-Za-z_]\w{0,79})(?=:|$)", re.ASCII)

_TIMES = ("created_at", "enqueued_at", "started_at", "ended_at")
_TEXTS = ("origin", "status", "worker_name", "timeout", "retries_left", "tokenmill_model")


@dataclass(frozen=True)
class FailedJob:
    """One entry of a queue's failed jobs.

    job_id: as it is listed. function: its name, None where the job is gone, too large or not readable.
    ended_at: Unix time in seconds. reason: the error's class. error: its last line. Both are "" for none.
    is_stopped: a cancel stopped it, of itself or of its run; RQ lists it among the failed ones.
    """

    job_id: bytes
    queue: bytes
    function: str | None
    ended_at: float | None
    reason: str
    error: str
    is_stopped: bool = False


@dataclass(frozen=True)
class JobSeen:
    """One job. texts, times: those fields of its hash that it has, as they may be shown; Unix seconds.

    function: its name, None where that cannot be read. arguments, meta: JSON, None unless asked for and
    readable. progress: counts that it keeps in its meta, such as rows_done. depends_on, dependents: ids of
    some of the jobs that it was enqueued to wait for, and of those that wait for it. is_failed: whether it is
    among the failed ones of its queue, so that it can be put back. is_under_way: whether it says that it
    waits or runs. error: the whole text, its end where that is long. error_line: its last line; "" for none.
    """

    job_id: str
    texts: dict[str, str]
    times: dict[str, float]
    function: str | None
    arguments: str | None
    meta: str | None
    progress: dict[str, int]
    depends_on: list[str]
    dependents: list[str]
    is_failed: bool
    is_under_way: bool
    error: str
    error_line: str


def newest_failed(connection: Redis, queues: Sequence[bytes], most: int) -> list[FailedJob]:
    """Return the failed jobs of these queues that are kept longest, which are the newest, at most `most`.

    Those that were stopped are left out, as far as so many entries of a queue show others.
    """
    with connection.pipeline(transaction=False) as pipe:
        for queue in queues:
            pipe.zrevrange(_failed(queue), 0, most + MAX_STOPPED - 1, withscores=True)
        replies = pipe.execute(raise_on_error=False)
    found = [
        (score, job_id, queue)
        for queue, reply in zip(queues, replies, strict=True)
        if isinstance(reply, list)
        for job_id, score in reply
    ]
    found.sort(key=lambda entry: entry[0], reverse=True)
    entries = [(job_id, queue) for _, job_id, queue in found[: most + MAX_STOPPED]]
    with connection.pipeline(transaction=False) as pipe:
        for job_id, _ in entries:
            pipe.hget(JOB_PREFIX.encode() + job_id, "status")
        statuses = pipe.execute(raise_on_error=False)
    failed = [each for each, status in zip(entries, statuses, strict=True) if not _is_stopped(status)]
    return _read_failed(connection, failed[:most])


def failed_page(connection: Redis, queue: bytes, offset: int, most: int) -> list[FailedJob]:
    """Return up to `most` failed jobs of one queue, the newest first, without the first `offset`.

    Raises redis.exceptions.ResponseError where the key is of another type.
    """
    job_ids: Any = connection.zrevrange(_failed(queue), offset, offset + most - 1)
    return _read_failed(connection, [(job_id, queue) for job_id in job_ids])


def read_job(connection: Redis, job_id: str, *, with_arguments: bool = False) -> JobSeen | None:
    """Return what is known of a job, None for one that Redis does not know."""
    key = JOB_PREFIX + job_id
    with connection.pipeline(transaction=False) as pipe:
        pipe.hmget(key, [*_TEXTS, *_TIMES])
        pipe.hstrlen(key, "data")
        pipe.hstrlen(key, "meta")
        pipe.hstrlen(key, "dependency_ids")
        pipe.xrevrange(results_key(job_id), count=1)
        fields, data_bytes, meta_bytes, ids_bytes, results = pipe.execute(raise_on_error=False)
    if isinstance(fields, Exception) or not any(each is not None for each in fields):
        return None
    texts = dict(zip(_TEXTS, fields, strict=False))
    times = dict(zip(_TIMES, fields[len(_TEXTS) :], strict=True))
    queue = texts["origin"] or b""
    with connection.pipeline(transaction=False) as pipe:
        pipe.hget(key, "data" if _fits(data_bytes) else "")
        pipe.hget(key, "meta" if _fits(meta_bytes) else "")
        pipe.zscore(_failed(queue), job_id)
        pipe.srandmember(relatives_keys(job_id)[0], MAX_RELATIVES)
        data, meta, score, dependents = pipe.execute(raise_on_error=False)
    called, error, kept = _call(data), _error(results), stored.json_object(meta)
    return JobSeen(
        job_id=job_id,
        texts={name: safe_name(raw) for name, raw in texts.items() if raw},
        times={name: at for name, raw in times.items() if (at := _unix(raw)) is not None},
        function=called.function if called else None,
        arguments=called.arguments if called and with_arguments else None,
        meta=_json_text(kept) if kept and with_arguments else None,
        progress={
            safe_name(name, 40): number
            for name, value in list(kept.items())[:20]
            if (number := stored.count(value)) is not None
        },
        depends_on=dependency_ids(connection, job_id)[:MAX_RELATIVES] if _fits(ids_bytes) else [],
        dependents=sorted(stored.text(each) for each in dependents) if isinstance(dependents, list) else [],
        is_failed=isinstance(score, float),
        is_under_way=job_status(texts["status"]) in CANCELLABLE,
        error=printable(error[-MAX_ERROR_CHARS:], kept="\n"),
        error_line=error_line(error),
    )


@dataclass(frozen=True)
class _Call:
    function: str
    arguments: str


def _read_failed(connection: Redis, entries: Sequence[tuple[bytes, bytes]]) -> list[FailedJob]:
    keys = [JOB_PREFIX.encode() + job_id for job_id, _ in entries]
    with connection.pipeline(transaction=False) as pipe:
        for key, (job_id, _) in zip(keys, entries, strict=True):
            pipe.hmget(key, "ended_at", "status")
            pipe.hstrlen(key, "data")
            pipe.xrevrange(results_key("").encode() + job_id, count=1)
        told = pipe.execute(raise_on_error=False)
        for key, data_bytes in zip(keys, told[1::3], strict=True):
            pipe.hget(key, "data" if _fits(data_bytes) else "")
        payloads = pipe.execute(raise_on_error=False)
    found = []
    for (job_id, queue), fields, results, data in zip(entries, told[::3], told[2::3], payloads, strict=True):
        ended_at, status = (None, None) if isinstance(fields, Exception) else fields
        called, error = _call(data), _error(results)
        line = error_line(error)
        found.append(
            FailedJob(
                job_id,
                queue,
                called.function if called else None,
                _unix(ended_at),
                reason_of(line),
                line,
                _is_stopped(status) or error.rstrip().endswith(f"\n{fault_line('cancelled')}"),
            )
        )
    return found


def _is_stopped(status: object) -> bool:
    return job_status(status) is JobStatus.STOPPED


def reason_of(line: str) -> str:
    """Return the class of an error by its last line, such as `PromptTooLong`; "" where it names none."""
    found = _CLASS.match(line)
    return found[1] if found else ""


def _error(results: object) -> str:
    """Return the error in what XREVRANGE gave of a job's results; "" for none."""
    if not isinstance(results, list) or not results:
        return ""
    return error_text(results[0][1])


def _failed(queue: bytes) -> bytes:
    return queue_keys("").failed.encode() + queue


def _fits(num_bytes: object) -> bool:
    return isinstance(num_bytes, int) and num_bytes <= MAX_PAYLOAD_BYTES


def _unix(raw: object) -> float | None:
    try:
        return datetime.fromisoformat(raw.decode()).timestamp() if isinstance(raw, bytes) else None
    except (ValueError, OverflowError, OSError):
        return None


def _call(data: object) -> _Call | None:
    """Return what a payload of JSON calls; None for any other."""
    unpacked = stored.unpacked(data, 4 * MAX_PAYLOAD_BYTES) if isinstance(data, bytes) else None
    try:
        function, _, args, kwargs = json.loads(unpacked or b"")
    except (ValueError, TypeError, RecursionError):
        return None
    if not isinstance(function, str):
        return None
    return _Call(safe_name(function, 120), _json_text({"args": args, "kwargs": kwargs}))


def _json_text(value: object) -> str:
    return printable(json.dumps(value, ensure_ascii=False, indent=2)[:MAX_ERROR_CHARS], kept="\n")
