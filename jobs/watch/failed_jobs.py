"""Failed jobs with their errors, within bounds: a queue may have many thousands."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from redis import Redis

from jobs.common import rq_jobs, stored
from jobs.common.display import printable, safe_name
from jobs.common.rq_jobs import JobStatus
from jobs.errors import fault_line
from jobs.runs.watching.snapshot import error_line
from jobs.watch.job_actions import CANCELLABLE

#: A job's payload and meta are read up to so many bytes, packed and unpacked.
MAX_PAYLOAD_BYTES = 1 << 16

#: Of an error, such as a traceback, as much of its end is shown.
MAX_ERROR_CHARS = 20_000

#: Stopped jobs that are passed over where the newest failed ones are looked for: a cancel may have made many.
MAX_STOPPED = 100

#: Of a job's dependencies, and of its dependents, so many are shown.
MAX_RELATIVES = 20

_TIMES = ("created_at", "enqueued_at", "started_at", "ended_at")
_TEXTS = ("origin", "status", "worker_name", "timeout", "retries_left", "tokenmill_model")


@dataclass(frozen=True)
class JobSeen:
    """One job, as it may be shown. texts, times: fields of its hash that it has; Unix seconds.

    queue: its own. function: None where its name cannot be read. arguments, meta: JSON, None unless asked for and
    readable. progress: counts in its meta. dependents, depends_on: ids of some; the second of one job alone. is_failed:
    whether it can be put back. is_stopped: whether a cancel stopped it: RQ lists it among the failed ones.
    is_under_way: whether it waits or runs. error: the end of its text. error_line: its last line; "" for none.
    """

    job_id: str
    queue: str
    texts: dict[str, str]
    times: dict[str, float]
    function: str | None
    arguments: str | None
    meta: str | None
    progress: dict[str, int]
    dependents: list[str]
    is_failed: bool
    is_stopped: bool
    is_under_way: bool
    error: str
    error_line: str
    depends_on: Sequence[str] = ()


def newest_failed(connection: Redis, queues: Sequence[str], most: int) -> list[JobSeen]:
    """Return at most `most` failed jobs of these queues, the newest, without those that were stopped."""
    with connection.pipeline(transaction=False) as pipe:
        for queue in queues:
            pipe.zrevrange(rq_jobs.QueueKeys(queue).failed, 0, most + MAX_STOPPED - 1, withscores=True)
        found = [
            (score, stored.text(job_id), queue)
            for queue, entries in zip(queues, pipe.execute(), strict=True)
            for job_id, score in entries
        ]
    found.sort(key=lambda entry: entry[0], reverse=True)
    newest = [(job_id, queue) for _, job_id, queue in found[: most + MAX_STOPPED]]
    with connection.pipeline(transaction=False) as pipe:
        for job_id, _ in newest:
            pipe.hget(rq_jobs.job_key(job_id), "status")
        statuses = pipe.execute()
    failed = [each for each, status in zip(newest, statuses, strict=True) if not _is_stopped(status)]
    return read_jobs(connection, failed[:most])


def failed_page(connection: Redis, queue: str, offset: int, most: int) -> list[JobSeen]:
    """Return up to `most` failed jobs of one queue, the newest first, without the first `offset`."""
    job_ids: Any = connection.zrevrange(rq_jobs.QueueKeys(queue).failed, offset, offset + most - 1)
    return read_jobs(connection, [(stored.text(job_id), queue) for job_id in job_ids])


def read_job(connection: Redis, job_id: str, *, with_arguments: bool = False) -> JobSeen | None:
    """Return what is known of a job, None for one that Redis does not know."""
    origin = stored.text(cast("bytes | None", connection.hget(rq_jobs.job_key(job_id), "origin")) or b"")
    [found] = read_jobs(connection, [(job_id, origin)], with_arguments=with_arguments)
    if not found.texts and not found.times:
        return None
    return replace(found, depends_on=rq_jobs.dependency_ids(connection, job_id)[:MAX_RELATIVES])


def read_jobs(connection: Redis, entries: Sequence[tuple[str, str]], *, with_arguments: bool = False) -> list[JobSeen]:
    """Return what is known of jobs. entries: their ids, each with its queue."""
    with connection.pipeline(transaction=False) as pipe:
        for job_id, _ in entries:
            pipe.hmget(rq_jobs.job_key(job_id), [*_TEXTS, *_TIMES])
            pipe.hstrlen(rq_jobs.job_key(job_id), "data")
            pipe.hstrlen(rq_jobs.job_key(job_id), "meta")
            pipe.xrevrange(rq_jobs.results_key(job_id), count=1)
        replies = pipe.execute()
        known = [replies[i::4] for i in range(4)]
        for (job_id, queue), data_bytes, meta_bytes in zip(entries, known[1], known[2], strict=True):
            pipe.hget(rq_jobs.job_key(job_id), "data" if data_bytes <= MAX_PAYLOAD_BYTES else "")
            pipe.hget(rq_jobs.job_key(job_id), "meta" if meta_bytes <= MAX_PAYLOAD_BYTES else "")
            pipe.zscore(rq_jobs.QueueKeys(queue).failed, job_id)
            pipe.smembers(rq_jobs.relatives_keys(job_id)[0])
        replies = pipe.execute()
    payloads = (replies[start : start + 4] for start in range(0, len(replies), 4))
    return [
        _seen(entry, fields, results, payload, with_arguments)
        for entry, fields, results, payload in zip(entries, known[0], known[3], payloads, strict=True)
    ]


def _seen(
    entry: tuple[str, str],
    fields: Sequence[bytes | None],
    results: Sequence[Any],
    payload: Sequence[Any],
    with_arguments: bool,
) -> JobSeen:
    texts = dict(zip(_TEXTS, fields, strict=False))
    data, meta, score, dependents = payload
    (function, arguments), kept = _call(data), stored.json_object(meta)
    error = rq_jobs.error_text(results[0][1]) if results else ""
    is_stopped = _is_stopped(texts["status"]) or error.rstrip().endswith(f"\n{fault_line('cancelled')}")
    times = {name: stored.moment(raw) for name, raw in zip(_TIMES, fields[len(_TEXTS) :], strict=True)}
    progress = {safe_name(name, 40): stored.count(value) for name, value in list(kept.items())[:20]}
    return JobSeen(
        *entry,
        texts={name: safe_name(raw) for name, raw in texts.items() if raw},
        times={name: at for name, at in times.items() if at is not None},
        function=function,
        arguments=arguments if with_arguments else None,
        meta=_json_text(kept) if kept and with_arguments else None,
        progress={name: number for name, number in progress.items() if number is not None},
        dependents=sorted(map(stored.text, dependents))[:MAX_RELATIVES],
        is_failed=score is not None,
        is_stopped=is_stopped,
        is_under_way=rq_jobs.job_status(texts["status"]) in CANCELLABLE,
        error=printable(error[-MAX_ERROR_CHARS:], kept="\n"),
        error_line=error_line(error),
    )


def _is_stopped(status: object) -> bool:
    return rq_jobs.job_status(status) is JobStatus.STOPPED


def _call(data: bytes | None) -> tuple[str | None, str | None]:
    """Return the function that a payload of JSON calls, and its arguments; None for any other payload."""
    try:
        function, _, args, kwargs = json.loads(stored.unpacked(data or b"", 4 * MAX_PAYLOAD_BYTES) or b"")
    except (ValueError, TypeError, RecursionError):
        return None, None
    if not isinstance(function, str):
        return None, None
    return safe_name(function, 120), _json_text({"args": args, "kwargs": kwargs})


def _json_text(value: object) -> str:
    return printable(json.dumps(value, ensure_ascii=False, indent=2)[:MAX_ERROR_CHARS], kept="\n")
