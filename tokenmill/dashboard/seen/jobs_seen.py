"""Jobs as pages show them: the failed ones of queues, of which there may be many thousands, and one with its error."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from redis import Redis

from jobs.common import rq_jobs, stored
from jobs.common.display import printable, safe_name
from jobs.common.keys import PROGRESS_FIELD
from jobs.common.rq_jobs import JobStatus
from jobs.errors import fault_line
from jobs.queues.flood import named_producer
from jobs.runs.job_cancel import CANCELLABLE
from jobs.runs.watching.failures import error_line

#: The most bytes of a job's payload or meta that are read, packed and unpacked.
MAX_PAYLOAD_BYTES = 1 << 16
#: The most characters of an error that are shown. They are its last ones.
MAX_ERROR_CHARS = 20_000
#: The most stopped jobs that are passed over to find failed ones. A cancel may have left many.
MAX_STOPPED = 100

MAX_RELATIVES = 20
_TIMES = ("created_at", "enqueued_at", "started_at", "ended_at")
_TEXTS = ("origin", "status", "worker_name", "timeout", "retries_left", "tokenmill_model")


@dataclass(frozen=True)
class FailedJob:
    """One of a queue's failed jobs.

    error: its last line. is_stopped: by a cancel, which RQ counts as failed. producer: whose it is, as its meta says.
    """

    job_id: str
    queue: str
    function: str | None
    ended_at: float | None
    error: str
    is_stopped: bool
    producer: str


@dataclass(frozen=True)
class JobSeen:
    """One job, as it may be shown. origin: its queue, not safe to show. texts, times: fields of its hash; Unix seconds.

    function: None where its name cannot be read. producer: whose it is, as its meta says. arguments, meta: JSON, None
    unless asked for and readable. is_failed: whether it can be put back. is_under_way: it waits or runs. error: the end
    of its text. error_line: its last line. whole_error: all of it, with the line that classes it; not to be shown.
    """

    job_id: str
    origin: str
    texts: dict[str, str]
    times: dict[str, float]
    function: str | None
    arguments: str | None
    meta: str | None
    progress: dict[str, int]
    producer: str
    depends_on: list[str]
    dependents: list[str]
    is_failed: bool
    is_under_way: bool
    error: str
    error_line: str
    whole_error: str


def newest_failed(connection: Redis, queues: Sequence[str], most: int) -> list[FailedJob]:
    """Return at most `most` failed jobs of these queues, the newest, without those that were stopped."""
    with connection.pipeline(transaction=False) as pipe:
        for queue in queues:
            pipe.zrevrange(
                rq_jobs.QueueKeys(queue).failed, 0, most + MAX_STOPPED - 1, withscores=True
            )
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
    failed = [
        each for each, status in zip(newest, statuses, strict=True) if not _is_stopped(status)
    ]
    return read_failed(connection, failed[:most])


def read_job(connection: Redis, job_id: str, *, with_arguments: bool = False) -> JobSeen | None:
    key = rq_jobs.job_key(job_id)
    with connection.pipeline(transaction=False) as pipe:
        pipe.hmget(key, [*_TEXTS, *_TIMES])
        pipe.hstrlen(key, "data")
        pipe.hstrlen(key, "meta")
        pipe.hstrlen(key, PROGRESS_FIELD)
        pipe.xrevrange(rq_jobs.results_key(job_id), count=1)
        fields, data_bytes, meta_bytes, progress_bytes, results = pipe.execute()
    if not any(each is not None for each in fields):
        return None
    texts = dict(zip(_TEXTS, fields, strict=False))
    times = dict(zip(_TIMES, fields[len(_TEXTS) :], strict=True))
    with connection.pipeline(transaction=False) as pipe:
        pipe.hget(key, "data" if data_bytes <= MAX_PAYLOAD_BYTES else "")
        pipe.hget(key, "meta" if meta_bytes <= MAX_PAYLOAD_BYTES else "")
        pipe.hget(key, PROGRESS_FIELD if progress_bytes <= MAX_PAYLOAD_BYTES else "")
        pipe.zscore(rq_jobs.QueueKeys(stored.text(texts["origin"] or b"")).failed, job_id)
        pipe.smembers(rq_jobs.relatives_keys(job_id)[0])
        data, meta, shown, score, dependents = pipe.execute()
    (function, arguments), error, kept = called(data), _error(results), stored.json_object(meta)
    return JobSeen(
        job_id=job_id,
        origin=stored.text(texts["origin"] or b""),
        texts={name: safe_name(raw) for name, raw in texts.items() if raw},
        times={name: at for name, raw in times.items() if (at := stored.moment(raw)) is not None},
        function=function,
        arguments=arguments if with_arguments else None,
        meta=_json_text(kept) if kept and with_arguments else None,
        producer=named_producer(kept),
        progress={
            safe_name(name, 40): number
            for name, value in list(stored.json_object(shown).items())[:20]
            if (number := stored.count(value)) is not None
        },
        depends_on=rq_jobs.dependency_ids(connection, job_id)[:MAX_RELATIVES],
        dependents=sorted(map(stored.text, dependents))[:MAX_RELATIVES],
        is_failed=score is not None,
        is_under_way=rq_jobs.job_status(texts["status"]) in CANCELLABLE,
        error=printable(
            error.removesuffix(f"\n{fault_line('cancelled')}")[-MAX_ERROR_CHARS:], allowed="\n"
        ),
        error_line=error_line(error),
        whole_error=error,
    )


def read_failed(connection: Redis, entries: Sequence[tuple[str, str]]) -> list[FailedJob]:
    """Return failed jobs. entries: their ids, each with its queue."""
    keys = [rq_jobs.job_key(job_id) for job_id, _ in entries]
    with connection.pipeline(transaction=False) as pipe:
        for key, (job_id, _) in zip(keys, entries, strict=True):
            pipe.hmget(key, "ended_at", "status")
            pipe.hstrlen(key, "data")
            pipe.hstrlen(key, "meta")
            pipe.xrevrange(rq_jobs.results_key(job_id), count=1)
        replies = pipe.execute()
        for key, data_bytes, meta_bytes in zip(keys, replies[1::4], replies[2::4], strict=True):
            pipe.hget(key, "data" if data_bytes <= MAX_PAYLOAD_BYTES else "")
            pipe.hget(key, "meta" if meta_bytes <= MAX_PAYLOAD_BYTES else "")
        fields = pipe.execute()
    found = []
    for entry, (ended_at, status), results, data, meta in zip(
        entries, replies[::4], replies[3::4], fields[::2], fields[1::2], strict=True
    ):
        error = _error(results)
        is_stopped = _is_stopped(status) or error.rstrip().endswith(f"\n{fault_line('cancelled')}")
        found.append(
            FailedJob(
                *entry,
                called(data)[0],
                stored.moment(ended_at),
                error_line(error),
                is_stopped,
                named_producer(stored.json_object(meta)),
            )
        )
    return found


def _is_stopped(status: object) -> bool:
    return rq_jobs.job_status(status) is JobStatus.STOPPED


def _error(results: Sequence[Any]) -> str:
    return rq_jobs.error_text(results[0][1]) if results else ""


def called(data: bytes | None) -> tuple[str | None, str | None]:
    """Return the function that a job's payload names, and its arguments as JSON; None for what cannot be read."""
    call = payload(data)
    if not call:
        return None, None
    arguments = {"args": call["args"], "kwargs": call["kwargs"]}
    return safe_name(call["function"], 120), _json_text(arguments)


def payload(data: Any) -> dict[str, Any]:
    """Return a job's payload by `function`, `args` and `kwargs`; {} if it cannot be read."""
    try:
        function, _, args, kwargs = json.loads(
            stored.unpack_at_most(data or b"", 4 * MAX_PAYLOAD_BYTES) or b""
        )
    except (ValueError, TypeError, RecursionError):
        return {}
    if not isinstance(function, str):
        return {}
    return {"function": function, "args": args, "kwargs": kwargs}


def _json_text(value: object) -> str:
    return printable(
        json.dumps(value, ensure_ascii=False, indent=2)[:MAX_ERROR_CHARS], allowed="\n"
    )
