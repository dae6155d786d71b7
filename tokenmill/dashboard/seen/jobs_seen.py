"""Reads jobs for pages: one job with its error, and the failed jobs of queues, which may be many thousands."""

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

#: The most bytes of a job's stored payload or meta that are read.
MAX_PAYLOAD_BYTES = 1 << 16
#: The most characters of an error that are shown: its end.
MAX_ERROR_CHARS = 20_000
#: The most stopped jobs that are skipped in the search for failed ones. A cancel may have left many.
MAX_STOPPED = 100
#: The most dependencies, and the most dependents, of a job that are shown.
MAX_RELATIVES = 20
#: The most numbers of a job's progress that are shown.
MAX_NUMBERS = 20
_TIMES = ("created_at", "enqueued_at", "started_at", "ended_at")
_TEXTS = ("origin", "status", "worker_name", "timeout", "retries_left", "tokenmill_model")


@dataclass(frozen=True)
class FailedJob:
    """A failed job of a queue.

    function: None if the payload cannot be read. ended_at: Unix seconds. error: the last line of the error.
    is_stopped: whether a cancel stopped the job. RQ counts such a job as failed.
    producer: the producer that the job's meta names; "" if it names none.
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
    """One job. Texts are safe to show, except `origin` and `whole_error`.

    origin: the job's queue. texts, times: fields of the job's hash; times are Unix seconds.
    function: None if the payload cannot be read. arguments, meta: JSON text; None if they were not requested or cannot
    be read. progress: numbers by name. producer: the producer that the job's meta names; "" if it names none.
    is_failed: whether the job is in its queue's list of failed jobs, and so can be put back.
    is_under_way: whether the job waits or runs.
    error: the end of the error. error_line: its last line. whole_error: the error with the line that names the fault.
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
    """Return at most `most` failed jobs of these queues, the newest first, without jobs that a cancel stopped."""
    # Stopped jobs are skipped, so more jobs are read than are returned.
    num_read = most + MAX_STOPPED
    with connection.pipeline(transaction=False) as pipe:
        for queue in queues:
            pipe.zrevrange(rq_jobs.QueueKeys(queue).failed, 0, num_read - 1, withscores=True)
        replies = pipe.execute()
    scored = []
    for queue, entries in zip(queues, replies, strict=True):
        for job_id, score in entries:
            scored.append((score, stored.text(job_id), queue))
    scored.sort(key=lambda entry: entry[0], reverse=True)
    newest = [(job_id, queue) for _, job_id, queue in scored[:num_read]]

    with connection.pipeline(transaction=False) as pipe:
        for job_id, _ in newest:
            pipe.hget(rq_jobs.job_key(job_id), "status")
        statuses = pipe.execute()
    failed = []
    for job, status in zip(newest, statuses, strict=True):
        if not _is_stopped(status):
            failed.append(job)
    return read_failed(connection, failed[:most])


def read_job(connection: Redis, job_id: str, *, with_arguments: bool = False) -> JobSeen | None:
    """Return a job; None if Redis does not have it. Raises RedisError.

    with_arguments: whether to return the job's arguments and its meta.
    """
    key = rq_jobs.job_key(job_id)
    dependents_key, _ = rq_jobs.relatives_keys(job_id)
    with connection.pipeline(transaction=False) as pipe:
        pipe.hmget(key, list(_TEXTS))
        pipe.hmget(key, list(_TIMES))
        pipe.hstrlen(key, "data")
        pipe.hstrlen(key, "meta")
        pipe.hstrlen(key, PROGRESS_FIELD)
        pipe.xrevrange(rq_jobs.results_key(job_id), count=1)
        raw_texts, raw_times, data_bytes, meta_bytes, progress_bytes, results = pipe.execute()
    if all(raw is None for raw in [*raw_texts, *raw_times]):
        return None
    texts = dict(zip(_TEXTS, raw_texts, strict=True))
    origin = stored.text(texts["origin"] or b"")
    times = {}
    for name, raw in zip(_TIMES, raw_times, strict=True):
        at = stored.moment(raw)
        if at is not None:
            times[name] = at

    with connection.pipeline(transaction=False) as pipe:
        pipe.hget(key, _field_to_read("data", data_bytes))
        pipe.hget(key, _field_to_read("meta", meta_bytes))
        pipe.hget(key, _field_to_read(PROGRESS_FIELD, progress_bytes))
        pipe.zscore(rq_jobs.QueueKeys(origin).failed, job_id)
        pipe.smembers(dependents_key)
        data, raw_meta, raw_progress, failed_score, dependents = pipe.execute()
    function, arguments = called(data)
    meta = stored.json_object(raw_meta)
    error = _error(results)
    # The page itself says that a job was cancelled, so the line that tells it to programs is left out.
    shown_error = error.removesuffix(f"\n{fault_line('cancelled')}")[-MAX_ERROR_CHARS:]
    return JobSeen(
        job_id=job_id,
        origin=origin,
        texts={name: safe_name(raw) for name, raw in texts.items() if raw},
        times=times,
        function=function,
        arguments=arguments if with_arguments else None,
        meta=_json_text(meta) if meta and with_arguments else None,
        producer=named_producer(meta),
        progress=_progress(raw_progress),
        depends_on=rq_jobs.dependency_ids(connection, job_id)[:MAX_RELATIVES],
        dependents=sorted(map(stored.text, dependents))[:MAX_RELATIVES],
        is_failed=failed_score is not None,
        is_under_way=rq_jobs.job_status(texts["status"]) in CANCELLABLE,
        error=printable(shown_error, allowed="\n"),
        error_line=error_line(error),
        whole_error=error,
    )


def read_failed(connection: Redis, entries: Sequence[tuple[str, str]]) -> list[FailedJob]:
    """Return failed jobs, in the order of the entries. entries: (job id, queue)."""
    keys = [rq_jobs.job_key(job_id) for job_id, _ in entries]
    with connection.pipeline(transaction=False) as pipe:
        for key, (job_id, _) in zip(keys, entries, strict=True):
            pipe.hmget(key, "ended_at", "status")
            pipe.hstrlen(key, "data")
            pipe.hstrlen(key, "meta")
            pipe.xrevrange(rq_jobs.results_key(job_id), count=1)
        replies = _grouped(pipe.execute(), 4)
        for key, (_, data_bytes, meta_bytes, _) in zip(keys, replies, strict=True):
            pipe.hget(key, _field_to_read("data", data_bytes))
            pipe.hget(key, _field_to_read("meta", meta_bytes))
        payloads = _grouped(pipe.execute(), 2)

    jobs = []
    for (job_id, queue), reply, (data, meta) in zip(entries, replies, payloads, strict=True):
        (ended_at, status), _, _, results = reply
        function, _ = called(data)
        error = _error(results)
        names_cancel = error.rstrip().endswith(f"\n{fault_line('cancelled')}")
        jobs.append(
            FailedJob(
                job_id,
                queue,
                function=function,
                ended_at=stored.moment(ended_at),
                error=error_line(error),
                is_stopped=_is_stopped(status) or names_cancel,
                producer=named_producer(stored.json_object(meta)),
            )
        )
    return jobs


def _grouped(replies: Sequence[Any], size: int) -> list[Sequence[Any]]:
    """Return a pipeline's replies in groups of some size: one group for each job."""
    return [replies[start : start + size] for start in range(0, len(replies), size)]


def _field_to_read(field: str, num_bytes: int) -> str:
    """Return a field's name if its value is short enough to be read; otherwise "", which is no job's field."""
    return field if num_bytes <= MAX_PAYLOAD_BYTES else ""


def _is_stopped(status: object) -> bool:
    return rq_jobs.job_status(status) is JobStatus.STOPPED


def _error(results: Sequence[Any]) -> str:
    """Return the error of the latest of a job's results; "" if there is none."""
    if not results:
        return ""
    _, fields = results[0]
    return rq_jobs.error_text(fields)


def _progress(raw: Any) -> dict[str, int]:
    """Return the numbers of a job's progress by name, without values that are not counts."""
    progress = {}
    for name, value in list(stored.json_object(raw).items())[:MAX_NUMBERS]:
        number = stored.count(value)
        if number is not None:
            progress[safe_name(name, 40)] = number
    return progress


def called(data: bytes | None) -> tuple[str | None, str | None]:
    """Return the name of the function that a job calls, and the arguments as JSON text. data: the job's payload.

    Both are safe to show. Both are None if the payload cannot be read.
    """
    call = payload(data)
    if not call:
        return None, None
    arguments = {"args": call["args"], "kwargs": call["kwargs"]}
    return safe_name(call["function"], 120), _json_text(arguments)


def payload(data: Any) -> dict[str, Any]:
    """Return the `function`, `args` and `kwargs` of a job's payload; {} if it cannot be read."""
    try:
        unpacked = stored.unpack_at_most(data or b"", 4 * MAX_PAYLOAD_BYTES)
        function, _, args, kwargs = json.loads(unpacked or b"")
    except (ValueError, TypeError, RecursionError):
        return {}
    if not isinstance(function, str):
        return {}
    return {"function": function, "args": args, "kwargs": kwargs}


def _json_text(value: object) -> str:
    """Return the beginning of a value as JSON text, safe to show."""
    text = json.dumps(value, ensure_ascii=False, indent=2)
    return printable(text[:MAX_ERROR_CHARS], allowed="\n")
