"""Reads the state of runs from Redis. This takes a few round trips, however many runs there are."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

from redis import Redis

from jobs.common import rq_jobs, stored
from jobs.common.display import MAX_TEXT_CHARS, safe_name
from jobs.common.keys import PROGRESS_FIELD, REPORTED_AT, RUNS_KEY, run_key
from jobs.common.workers import Worker, read_workers
from jobs.errors import UnknownRun
from jobs.runs.plans.names import run_and_shard
from jobs.runs.redis_state.state import (
    PLAN_ERROR,
    REUSE_DIFFERS,
    SUBMISSION_TOTALS,
    SUBMITTED_BY,
    TOTALS,
    recorded_reasons,
)
from jobs.runs.redis_state.submission import DEADLINE
from jobs.runs.statistics.run_statistics import Reason
from jobs.runs.watching.run_reader import QueueJobs, RunReader
from jobs.runs.watching.snapshot import RunSnapshot
from jobs.runs.watching.time_left import Progress

MAX_RUNS = 200
MAX_REASONS = 20
#: The most entries that a list of runs reads from a queue's registry of running or failed jobs.
MAX_ENTRIES = 20_000

_FACTS = (
    "output",
    "queue",
    "plan_job",
    "plan_model",
    "rows",
    "shards",
    "model",
    "model_text",
    "max_errors",
    DEADLINE,
    "second_queue",
    "second_model",
    "second_text",
    "cancelled",
    "finished",
    "stopped",
    "submission",
    "cancelled_submission",
    "worked_s",
    "format",
    PLAN_ERROR,
    REUSE_DIFFERS,
    SUBMITTED_BY,
)
_COUNTS = (*TOTALS, *SUBMISSION_TOTALS)


def read_run_list(
    connection: Redis, runs: Iterable[str], workers: Iterable[Worker] | None = None
) -> list[RunSnapshot]:
    """Return the progress of runs, without runs that Redis does not know. Raises RedisError.

    This is cheap enough for a long list: at most MAX_ENTRIES entries of each queue's registries are read.
    workers: the workers if the caller has just read them; they are read by default.
    """
    workers = _listening(read_workers(connection) if workers is None else workers)
    snapshots = []
    for reader in _filled_readers(connection, runs, workers, MAX_ENTRIES):
        # Looking up jobs one by one takes long, so it is done only for a run that may have lost jobs.
        if reader.seems_idle and reader.may_lack_jobs:
            reader.find_jobs(connection)
        snapshots.append(_snapshot(connection, reader, workers))
    return snapshots


def read_runs(connection: Redis, runs: Iterable[str]) -> list[RunSnapshot]:
    """Return the exact progress of runs, without runs that Redis does not know. Raises RedisError.

    All entries of the registries are read, and the jobs of a run that seems idle are looked up one by one.
    """
    workers = _listening(read_workers(connection))
    snapshots = []
    for reader in _filled_readers(connection, runs, workers, max_entries=None):
        if reader.seems_idle:
            reader.find_jobs(connection)
        snapshots.append(_snapshot(connection, reader, workers))
    return snapshots


def _snapshot(connection: Redis, reader: RunReader, workers: Collection[Worker]) -> RunSnapshot:
    """Return a run's progress, with the time left if it runs."""
    snapshot = reader.snapshot(connection, workers)
    if snapshot.state != "running":
        return snapshot
    return replace(snapshot, left_s=reader.left_s(connection, workers))


def read_snapshot(connection: Redis, run: str) -> RunSnapshot:
    """Return a run's progress. Raises UnknownRun if Redis does not know the run."""
    snapshots = read_runs(connection, [run])
    if not snapshots:
        raise UnknownRun(run)
    return snapshots[0]


def read_planned(connection: Redis, run: str) -> RunSnapshot:
    """Return a run's progress, even if a worker has planned the run under another id. Raises UnknownRun.

    The id depends on the output's real path, which may differ between this machine and the worker's.
    """
    snapshot = read_snapshot(connection, run)
    if snapshot.shards is None and snapshot.plan_job is not None and not snapshot.is_planning:
        planned_run = rq_jobs.last_value(connection, snapshot.plan_job).get("run", run)
        if planned_run != run:
            return read_snapshot(connection, planned_run)
    return snapshot


def list_runs(
    connection: Redis,
    limit: int = MAX_RUNS,
    states: Collection[str] = (),
    workers: Iterable[Worker] | None = None,
) -> list[RunSnapshot]:
    """Return the progress of the last `limit` submitted runs, the newest first. Raises RedisError.

    states: words of STATES. Only runs in one of these states are returned; by default, runs in any state.
    workers: the workers if the caller has just read them; they are read by default.
    """
    snapshots = read_run_list(connection, _last_submitted(connection, limit), workers)
    if not states:
        return snapshots
    return [snapshot for snapshot in snapshots if snapshot.state in states]


def read_at_risk(connection: Redis, limit: int = MAX_RUNS) -> list[RunSnapshot]:
    """Return the runs that are expected to miss their deadline. Only the last `limit` submitted runs are looked at."""
    run_ids = _last_submitted(connection, limit)
    with connection.pipeline(transaction=False) as pipe:
        for run in run_ids:
            pipe.hmget(run_key(run), DEADLINE, "finished", "cancelled")
        replies = pipe.execute(raise_on_error=False)

    runs_with_deadline = []
    for run, values in zip(run_ids, replies, strict=True):
        if not isinstance(values, list):
            continue  # an error, because producers may write to these keys too
        deadline, finished, cancelled = values
        if deadline and not finished and not cancelled:
            runs_with_deadline.append(run)
    snapshots = read_runs(connection, runs_with_deadline)
    return [snapshot for snapshot in snapshots if snapshot.deadline_holds is False]


def _last_submitted(connection: Redis, limit: int) -> list[str]:
    """Return the ids of the last `limit` submitted runs, the newest first."""
    newest: Any = connection.zrevrange(RUNS_KEY, 0, limit - 1)
    return list(map(stored.text, newest))


def run_reasons(connection: Redis, run: str) -> list[Reason]:
    """Return why rows of a run have an error: at most MAX_REASONS reasons, the commonest first, safe to show."""
    reasons = recorded_reasons(connection, run).commonest(MAX_REASONS)
    return [replace(reason, text=safe_name(reason.text, MAX_TEXT_CHARS)) for reason in reasons]


def read_progress(connection: Redis, job_ids: Sequence[str]) -> list[Progress]:
    """Return the progress in each job's hash, in the order of the ids."""
    with connection.pipeline(transaction=False) as pipe:
        for job_id in job_ids:
            pipe.hmget(
                rq_jobs.job_key(job_id), PROGRESS_FIELD, "started_at", "worker_name", "status"
            )
        replies = pipe.execute(raise_on_error=False)
    progress = []
    for reply in replies:
        if isinstance(reply, list):
            progress.append(_progress(*reply))
        else:  # an error, because producers may write to these keys too
            progress.append(Progress())
    return progress


def _progress(
    report: Any, started_at: bytes | None, worker: bytes | None, status: bytes | None
) -> Progress:
    """Return the progress that fields of a job's hash describe. report: JSON that the job has written."""
    numbers = stored.json_object(report)
    answered_tokens = stored.count(numbers.get("tokens")) or 0
    tokens_open = stored.count(numbers.get("tokens_open")) or 0
    return Progress(
        rows=stored.count(numbers.get("rows_done")) or 0,
        tokens=answered_tokens + tokens_open,
        rows_open=stored.count(numbers.get("rows_open")) or 0,
        tokens_open=tokens_open,
        shard_rows=stored.count(numbers.get("rows")) or 0,
        started_at=stored.moment(started_at),
        reported_at=stored.seconds(str(numbers.get(REPORTED_AT))),
        worker=safe_name(worker or b""),
        has_job=status is not None,
    )


def _listening(workers: Iterable[Worker]) -> list[Worker]:
    """Return the workers that listen on a queue."""
    return [worker for worker in workers if worker.queues]


def _filled_readers(
    connection: Redis, runs: Iterable[str], workers: Collection[Worker], max_entries: int | None
) -> list[RunReader]:
    """Return a reader for each run that Redis knows, filled with its queues, parts, progress and stopped jobs.

    max_entries: the most entries that are read from a queue's registry; None for all.
    """
    readers = run_readers(connection, runs)
    queues = _read_queues(connection, readers, max_entries)
    for reader in readers:
        reader.add_queues(queues)
    # Parts are read after the queues. So a shard that ends in between counts as done, and not as lost.
    _read_parts(connection, readers)

    served_queues: set[str] = set()
    for worker in workers:
        if not worker.is_silent:
            served_queues.update(worker.queues)
    for reader in readers:
        reader.progress = read_progress(connection, list(reader.running.values()))
        has_work = bool(reader.progress) or reader.has_just_ended_a_shard
        reader.is_worked_on = has_work and not served_queues.isdisjoint(reader.queues)
        reader.find_stopped(connection)
    return readers


def _read_queues(
    connection: Redis, readers: Sequence[RunReader], max_entries: int | None
) -> dict[str, QueueJobs]:
    """Read each queue of the readers' runs once; return the queues' jobs by the queue's name.

    max_entries: the most entries that are read from a registry; None for all.
    """
    max_entries_of: dict[str, int | None] = {}  # by queue
    for reader in readers:
        for name in reader.queues:
            if reader.is_finished:
                # A finished run needs no entries, but `read_queue` always reads at least one.
                max_entries_of.setdefault(name, 1)
            else:
                max_entries_of[name] = max_entries
    queues = {}
    for name, most in max_entries_of.items():
        queues[name] = read_queue(connection, name, most)
    return queues


def run_readers(connection: Redis, runs: Iterable[str]) -> list[RunReader]:
    """Return a reader for each run that Redis knows. A run without an output or a queue is left out."""
    run_ids = list(runs)
    facts_of: dict[str, dict[str, str]] = {}  # by run
    with connection.pipeline(transaction=False) as pipe:
        for run in run_ids:
            pipe.hmget(run_key(run), _FACTS)
        # Producers may write to these keys too, so a reply may be an error. Only the run of such a reply is left out.
        replies = pipe.execute(raise_on_error=False)
        for run, values in zip(run_ids, replies, strict=True):
            if not isinstance(values, list):
                continue
            facts = _texts(_FACTS, values)
            if "output" in facts and "queue" in facts:
                facts_of[run] = facts

        for facts in facts_of.values():
            pipe.hget(rq_jobs.job_key(facts.get("plan_job", "")), "status")
        statuses = pipe.execute(raise_on_error=False)

    readers = []
    for (run, facts), status in zip(facts_of.items(), statuses, strict=True):
        readers.append(RunReader(run, facts, rq_jobs.job_status(status)))
    return readers


def read_queue(connection: Redis, name: str, max_entries: int | None) -> QueueJobs:
    """Read a queue's waiting, running and failed jobs.

    max_entries: the most entries that are read from a registry; None for all.
    """
    keys = rq_jobs.QueueKeys(name)
    last_index = -1 if max_entries is None else max_entries - 1  # for Redis, -1 is the last entry
    with connection.pipeline(transaction=False) as pipe:
        # A job moves through the keys in this order, so a job that moves while they are read is not missed.
        pipe.llen(keys.waiting)
        pipe.llen(keys.popped)
        pipe.zrange(keys.started, 0, last_index)
        pipe.zrevrange(keys.failed, 0, last_index)
        waiting, popped, started, failed = pipe.execute()
    return QueueJobs(waiting + popped, _jobs_by_run(started), _jobs_by_run(failed))


def _read_parts(connection: Redis, readers: Sequence[RunReader]) -> None:
    """Read each run's counts, its number of parts, and which of its shards have both a job and a part."""
    shards_with_jobs = []  # a list of shards for each reader
    for reader in readers:
        shards_with_jobs.append(list(reader.started.keys() | reader.failed.keys()))
    with connection.pipeline(transaction=False) as pipe:
        for reader, shards in zip(readers, shards_with_jobs, strict=True):
            parts_key = run_key(reader.run, "parts")
            pipe.hmget(run_key(reader.run), _COUNTS)
            pipe.hlen(parts_key)
            pipe.hmget(parts_key, ["total", *map(str, shards)])
        replies = iter(pipe.execute())

    for reader, shards in zip(readers, shards_with_jobs, strict=True):
        counts = next(replies)
        num_fields = next(replies)
        total, *records = next(replies)
        shards_with_part = set()
        for shard, record in zip(shards, records, strict=True):
            if record is not None:
                shards_with_part.add(shard)
        # The hash has a field for each part and, if the number of shards is known, the field "total".
        num_parts = num_fields if total is None else num_fields - 1
        reader.add_parts(_texts(_COUNTS, counts), num_parts, shards_with_part)


def _jobs_by_run(entries: Iterable[bytes]) -> dict[str, dict[int, str]]:
    """Return the ids of shards' jobs in a registry, by run and shard. An entry is `<job>` or `<job>:<execution>`."""
    jobs: dict[str, dict[int, str]] = {}
    for entry in entries:
        job_id, _, _ = stored.text(entry).partition(":")
        run_shard = run_and_shard(job_id)
        if run_shard is None:
            continue  # a job of no run
        run, shard = run_shard
        if shard is not None:  # a planning job has no shard
            jobs.setdefault(run, {})[shard] = job_id
    return jobs


def _texts(names: Sequence[str], values: Sequence[bytes | None]) -> dict[str, str]:
    """Return values of Redis as texts, by their names. A missing value is left out."""
    texts = {}
    for name, value in zip(names, values, strict=True):
        if value is not None:
            texts[name] = stored.text(value)
    return texts
