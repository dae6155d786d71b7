"""What Redis knows of a run at one moment, in a few round trips however many shards it has."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, NamedTuple

from redis import Redis

from jobs.common import rq_jobs, stored
from jobs.common.display import MAX_TEXT_CHARS, safe_name
from jobs.common.keys import SILENT_S, SUBMISSION_FIELD, WORKER_STATS_TTL_S, worker_key
from jobs.common.rq_jobs import JobStatus
from jobs.errors import FAULT_PREFIX
from jobs.runs.plans.names import job_shard, shard_job_id
from jobs.runs.redis_state.run_jobs import num_held
from jobs.runs.redis_state.state import OF_TIME, PLAN_ERROR, RunState
from jobs.runs.redis_state.submission import ErrorLimit
from jobs.runs.statistics.part_stats import COUNTED
from jobs.runs.watching.time_left import Progress, time_left

WAITING = (JobStatus.QUEUED, JobStatus.STARTED, JobStatus.SCHEDULED, JobStatus.DEFERRED)

#: States of a planning job that has ended without a plan.
REFUSED = (JobStatus.FAILED, JobStatus.STOPPED, JobStatus.CANCELED)

#: For how long what a worker told lately is kept at least.
TOLD_LATELY_S = WORKER_STATS_TTL_S - SILENT_S

MAX_SOUGHT = 1000

_TOLD = (
    *("run", "state", "output", "model", "submitted_at", "began_at", "ended_at", "rows", "rows_done", "errors"),
    *("failed_checks", "cut", "rows_reused", "rows_escalated", "shards", "shards_done", "shards_started"),
    *("shards_failed", "prompt_tokens", "completion_tokens", "cached_tokens", "tokens", "rows_per_s", "tokens_per_s"),
    *("worked_s", "stopped", "workers", "awaited_model", "awaited_second", "left_s", "plan_error"),
)


@dataclass(frozen=True)
class RunSnapshot:
    """A run's progress. Texts but the queue's name are as they may be shown. rows, shards, model: None until planned.

    gone: queued shards whose job is in Redis no more. claimed: those that a worker holds, which may write the run's
    end. rows_done, tokens: generated ones, of running shards too; other counts are of finished shards. queue_length:
    jobs of any run. awaited_model: the run's, where no worker there serves it. stopped: why it was cancelled without
    anyone's word. failed_jobs: without those that an earlier cancel has stopped. Times are Unix seconds. rows_per_s,
    tokens_per_s: of a finished run over worked_s, for which workers had shards.
    """

    run: str
    output: str
    queue: str
    cancelled: bool
    finished: bool
    plan_job: str | None
    plan_status: JobStatus | None
    rows: int | None
    shards: int | None
    shards_done: int
    shards_started: int
    failed_jobs: tuple[str, ...]
    rows_done: int
    tokens: int
    workers: int
    queue_length: int
    awaited_model: str | None
    stopped: str | None
    too_many_errors: str | None
    claimed: int = 0
    gone: int = 0
    left_s: float | None = None
    plan_error: str | None = None
    silent_workers: tuple[str, ...] = ()
    awaited_second: str | None = None
    second_queue: str | None = None
    model: str | None = None
    submitted_at: float | None = None
    began_at: float | None = None
    ended_at: float | None = None
    worked_s: float | None = None
    rows_per_s: float | None = None
    tokens_per_s: float | None = None
    errors: int = 0
    failed_checks: int = 0
    cut: int = 0
    rows_reused: int = 0
    rows_escalated: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def to_object(self) -> dict[str, Any]:
        return {"queue": safe_name(self.queue), **{name: getattr(self, name) for name in _TOLD}}

    @property
    def is_active(self) -> bool:
        return self.state in ("planning", "running", "ending")

    @property
    def shards_failed(self) -> int:
        return 0 if self.cancelled else len(self.failed_jobs)

    @property
    def shards_left(self) -> int:
        """Return how many shards nobody computes until the run is submitted again."""
        if self.state not in ("cancelled", "stopped"):
            return 0
        return max(0, (self.shards or 0) - self.shards_done - self.shards_started)

    @property
    def queued(self) -> int:
        taken = self.shards_done + self.shards_started + len(self.failed_jobs) + self.gone
        return max(0, (self.shards or 0) - taken)

    @property
    def plan_failed(self) -> bool:
        """Whether the last submission's planning has failed, or is gone before it planned anything."""
        if self.plan_status is not None:
            return self.plan_status in REFUSED
        return self.plan_error is not None or self.shards is None

    @property
    def all_failed(self) -> bool:
        """Whether the run has finished, and each of its rows with an error that the limit does not allow."""
        return self.finished and self.too_many_errors is not None and 0 < self.errors == self.rows

    @property
    def is_planning(self) -> bool:
        return self.plan_status in WAITING

    @property
    def awaits_plan(self) -> bool:
        """Whether the run is planned now, or has to be before it moves on; shards that run count as its progress."""
        return self.is_planning and (self.plan_status is JobStatus.STARTED or not self.shards_started)

    @property
    def is_idle(self) -> bool:
        if self.is_planning or self.shards_started or self.claimed:
            return False
        if self.shards is None:
            return self.plan_status is None  # someone deleted its planning
        # On an empty queue no shard waits. Of a run that is whole the shard may wait that was to end it.
        return not ((self.queued or self.shards_done >= self.shards) and self.queue_length)

    @property
    def state(self) -> str:
        if self.finished and not self.is_planning:
            return "failed" if self.all_failed else "finished"
        if self.cancelled:
            return "cancelled" if self.stopped is None else "stopped"
        if self.awaits_plan:
            return "planning"
        if self.plan_failed and (self.shards is None or self.is_idle):
            return "failed"
        if self.shards is None:
            return "not planned"
        if self.shards_started or self.queued:
            return "running"
        return "failed" if self.failed_jobs or self.gone else "ending"


def read_snapshot(connection: Redis, run: str) -> RunSnapshot:
    """Read a run's progress. Raises UnknownRun when this Redis has no such run."""
    state = RunState(connection, run)
    facts = state.facts()
    plan_job = facts.get("plan_job")
    plan_status = rq_jobs.job_status(connection.hget(rq_jobs.job_key(plan_job or ""), "status"))
    workers = living_workers(connection)
    seen = read_queues(connection, facts, workers)
    started = shards_of(run, seen.started)
    parts = state.look(started)  # afterwards: what ends in between is done, and not nowhere
    running = {shard: job_id for shard, job_id in started.items() if shard not in parts.shards}
    shards, rows = stored.count(facts.get("shards")), stored.count(facts.get("rows"))
    # A failed job of a shard with a part was another execution's; or it failed to end a run that is whole.
    is_unended = len(parts.shards) >= (shards or 1) and "finished" not in facts and not started
    failed_shards = shards_of(run, seen.failed)
    done = frozenset() if is_unended else parts.shards
    failed = tuple(failed_shards[shard] for shard in sorted(failed_shards.keys() - done - running.keys()))
    stopped = _stopped_jobs(connection, failed, stored.count(facts.get("cancelled_submission")) or 0)
    progress = read_progress(connection, list(running.values()))
    under_way = dict(zip(running, progress, strict=True))
    silent = {each.worker for each in progress} - {each.name for each in workers if not each.is_silent}
    alive = {shard: each for shard, each in under_way.items() if each.worker not in silent}
    claimed = gone = 0
    if shards and not running and "finished" not in facts:
        planned = range(shards)
        rest = [shard for shard in planned if shard not in parts.shards]
        if not seen.length:
            kinds = (False, True) if "second_queue" in facts else (False,)
            jobs = (shard_job_id(run, shard, is_second) for shard in rest or planned for is_second in kinds)
            claimed = num_held(connection, jobs)
        if "cancelled" not in facts and plan_status not in WAITING:
            lost = [shard for shard in rest if shard not in failed_shards][:MAX_SOUGHT]
            sought = list(map(rq_jobs.job_key, shard_jobs(connection, run, lost, facts)))
            there: Any = connection.exists(*sought) if sought else 0
            gone = len(sought) - int(there) + len(stopped)
    snapshot = snapshot_of(
        run,
        facts,
        plan_status,
        seen,
        parts.counts,
        progress,
        shards_done=len(parts.shards),
        claimed=claimed,
        failed_jobs=tuple(job for job in failed if job not in stopped),
        plan_error=_plan_error(connection, facts, plan_job, shards, plan_status),
        gone=gone,
        silent_workers=tuple(sorted(silent)),
        awaited_second=_awaited_second(facts, workers),
        second_queue=facts.get("second_queue"),
    )
    left_s = time_left(facts.get("sizes"), shards, rows, parts, alive, time.time())
    return replace(snapshot, left_s=left_s if snapshot.state == "running" else None)


def snapshot_of(
    run: str,
    facts: Mapping[str, str],
    plan_status: JobStatus | None,
    queue: RunQueue,
    counts: Mapping[str, int],
    progress: Sequence[Progress],
    **known: Any,
) -> RunSnapshot:
    """Return a run as its facts tell. counts: of its parts. progress: of its running shards. known: the rest."""
    rows, model = stored.count(facts.get("rows")), facts.get("model_text")
    began_at, ended_at, worked_s = (float(facts[name]) if name in facts else None for name in OF_TIME)
    more_rows, more_tokens = sum(each.rows for each in progress), sum(each.tokens for each in progress)
    known |= {name: counts[name] for name in COUNTED if name not in ("rows", "generated_tokens")}
    rows_done, is_finished = counts["rows"] + more_rows, "finished" in facts
    limit = ErrorLimit.parse(facts.get("max_errors"))
    worked_s, end = (worked_s, ended_at) if is_finished else (None, time.time())
    if worked_s:
        seconds, by_then = worked_s, [counts["rows"], counts["generated_tokens"]]
    else:
        seconds = 0.0 if began_at is None or end is None else end - began_at
        by_then = [stored.count(facts.get(name)) or 0 for name in ("judged_rows", "judged_tokens")]
    return RunSnapshot(
        run=run,
        output=safe_name(facts["output"], MAX_TEXT_CHARS),
        queue=facts["queue"],
        cancelled="cancelled" in facts,
        finished=is_finished,
        plan_job=facts.get("plan_job"),
        plan_status=plan_status,
        rows=rows,
        shards=stored.count(facts.get("shards")),
        shards_started=len(progress),
        rows_done=rows_done if rows is None else min(rows_done, rows),  # totals may have a part twice
        tokens=counts["generated_tokens"] + more_tokens,
        workers=queue.workers,
        queue_length=queue.length,
        awaited_model=awaited_model(facts, plan_status, queue.models),
        stopped=safe_name(facts["stopped"], MAX_TEXT_CHARS) if "stopped" in facts else None,
        too_many_errors=limit.told(counts["rows"], counts["errors"], is_whole=is_finished),
        model=None if model is None else safe_name(model, MAX_TEXT_CHARS),
        submitted_at=(stored.count(facts.get("submission")) or 0) / 1000 or None,  # its number is when it came
        began_at=began_at,
        ended_at=ended_at,
        worked_s=worked_s,
        rows_per_s=(by_then[0] + more_rows) / seconds if seconds > 0 else None,
        tokens_per_s=(by_then[1] + more_tokens) / seconds if seconds > 0 else None,
        **known,
    )


def read_planned(connection: Redis, run: str) -> RunSnapshot:
    """Read a run's progress, or that of the run planned for it where the worker's real paths differ."""
    snapshot = read_snapshot(connection, run)
    if snapshot.shards is None and snapshot.plan_job is not None and not snapshot.is_planning:
        planned = rq_jobs.last_value(connection, snapshot.plan_job).get("run", run)
        if planned != run:
            return read_snapshot(connection, planned)
    return snapshot


def _plan_error(
    connection: Redis, facts: Mapping[str, str], plan_job: str | None, shards: int | None, status: JobStatus | None
) -> str | None:
    if status in (JobStatus.STOPPED, JobStatus.CANCELED):
        return "it was stopped"
    if status is JobStatus.FAILED and plan_job is not None:
        return failure_text(connection, plan_job)
    if status is None and PLAN_ERROR in facts:
        return safe_name(facts[PLAN_ERROR], MAX_TEXT_CHARS)
    if status is None and shards is None and "cancelled" not in facts:
        return f"its job is gone from queue {facts['queue']!r}, which was emptied perhaps: submit it again"
    return None


def _stopped_jobs(connection: Redis, failed: Sequence[str], cancelled: int) -> set[str]:
    if not cancelled or not failed:
        return set()
    with connection.pipeline(transaction=False) as pipe:
        for job_id in failed:
            pipe.hget(rq_jobs.job_key(job_id), SUBMISSION_FIELD)
        found = [stored.count(stored.text(each or b"")) or 0 for each in pipe.execute()]
    return {job_id for job_id, number in zip(failed, found, strict=True) if number <= cancelled}


def awaited_model(
    facts: Mapping[str, str], plan_status: JobStatus | None, models: Collection[str] | None
) -> str | None:
    """Return the model, as it is shown, that a run's next step needs and no worker of its queue serves."""
    if plan_status in WAITING:
        needed = name = facts.get("plan_model")
    else:
        needed, name = facts.get("model"), facts.get("model_text")
    if needed is None or models is None or needed in models:
        return None
    return name and safe_name(name, MAX_TEXT_CHARS)


def _awaited_second(facts: Mapping[str, str], workers: Iterable[Listener]) -> str | None:
    if "second_queue" not in facts:
        return None
    _, models = served_on(workers, facts["second_queue"])
    if models is None or facts["second_model"] in models:
        return None
    model = safe_name(facts["second_text"], MAX_TEXT_CHARS)
    return f"no worker on queue {facts['second_queue']!r} serves model {model}, which is asked again: start one there"


def failure_text(connection: Redis, job_id: str) -> str:
    """Return the last line of a failed job's error, before the line that classes it, or that it left none."""
    return error_line(rq_jobs.last_error(connection, job_id)) or "it left no error"


def error_line(error: str) -> str:
    """Return the last line of an error as it may be shown, before the line that classes it; "" for none."""
    lines = [each for each in error.strip().splitlines() if not each.startswith(FAULT_PREFIX)]
    return safe_name(lines[-1], MAX_TEXT_CHARS) if lines else ""


@dataclass(frozen=True)
class RunQueue:
    """What a queue's keys say. models: that its workers serve; None where one does not say, as RQ's own."""

    started: Sequence[bytes]
    failed: Sequence[bytes]
    length: int
    workers: int
    models: set[str] | None

    def joined(self, second: RunQueue) -> RunQueue:
        """Return it with the jobs of another one, whose workers do not count."""
        started, failed = [*self.started, *second.started], [*self.failed, *second.failed]
        return replace(self, started=started, failed=failed, length=self.length + second.length)


def read_queue(connection: Redis, name: str, workers: Iterable[Listener], most: int = 0) -> RunQueue:
    """Look at a queue in the order in which jobs move on, so none is missed. most: entries of a registry; 0 for all."""
    keys = rq_jobs.QueueKeys(name)
    with connection.pipeline(transaction=False) as pipe:
        pipe.llen(keys.waiting)
        pipe.llen(keys.popped)
        pipe.zrange(keys.started, 0, most - 1)
        pipe.zrevrange(keys.failed, 0, most - 1)
        waiting, popped, started, failed = pipe.execute()
    return RunQueue(started, failed, waiting + popped, *served_on(workers, name))


def run_queues(facts: Mapping[str, str]) -> list[str]:
    return list(dict.fromkeys((facts["queue"], facts.get("second_queue", facts["queue"]))))


def read_queues(
    connection: Redis, facts: Mapping[str, str], workers: Iterable[Listener] = (), most: int = 0
) -> RunQueue:
    return reduce(RunQueue.joined, [read_queue(connection, name, workers, most) for name in run_queues(facts)])


class Listener(NamedTuple):
    """A worker that listens on queues, what it told last, and whether that was long ago: it was killed perhaps."""

    name: str
    queues: list[str]
    told: dict[str, Any]
    is_silent: bool


def living_workers(connection: Redis) -> list[Listener]:
    """Return the workers that Redis has; RQ's list of a queue's is not asked, as producers could then write it."""
    keys: Any = connection.smembers(rq_jobs.WORKERS_KEY)
    names = [stored.text(key).removeprefix(rq_jobs.WORKER_PREFIX) for key in keys]
    with connection.pipeline(transaction=False) as pipe:
        for key, name in zip(keys, names, strict=True):
            pipe.hget(key, "queues")  # a killed worker's own key expires, its entry in the set stays
            pipe.get(worker_key(name))
            pipe.ttl(worker_key(name))
        replies = pipe.execute(raise_on_error=False)
    return [
        Listener(name, stored.text(queues).split(","), stored.json_object(told), 0 <= left_s < TOLD_LATELY_S)
        for name, queues, told, left_s in zip(names, replies[::3], replies[1::3], replies[2::3], strict=True)
        if isinstance(queues, bytes)
    ]


def served_on(workers: Iterable[Listener], queue: str) -> tuple[int, set[str] | None]:
    """Return how many of the workers listen on a queue, and all names of the models they serve, if all say that."""
    listening = [each for each in workers if queue in each.queues]
    if any(each.told == {} for each in listening):
        return len(listening), None
    # A killed worker's key lives on for minutes, and what it served with it.
    served = [each.told.get("models") for each in listening if not each.is_silent]
    models = {name for names in served if isinstance(names, list) for name in names if isinstance(name, str)}
    return len(listening), models


def shards_of(run: str, entries: Iterable[bytes]) -> dict[int, str]:
    """Return this run's shards among a registry's entries, `<job>` or `<job>:<execution>`, and their jobs' ids."""
    ids = (stored.text(entry).partition(":")[0] for entry in entries)
    return {shard: job_id for job_id in ids if (shard := job_shard(run, job_id)) is not None}


def shard_jobs(connection: Redis, run: str, shards: Sequence[int], facts: Mapping[str, str]) -> list[str]:
    """Return the ids of shards' jobs: those that ask the second model where they are there."""
    ids = [shard_job_id(run, shard) for shard in shards]
    if "second_queue" not in facts:
        return ids
    second = [shard_job_id(run, shard, is_second=True) for shard in shards]
    with connection.pipeline(transaction=False) as pipe:
        for job_id in second:
            pipe.exists(rq_jobs.job_key(job_id))
        return [after if there else id for id, after, there in zip(ids, second, pipe.execute(), strict=True)]


def read_progress(connection: Redis, job_ids: Sequence[str]) -> list[Progress]:
    with connection.pipeline(transaction=False) as pipe:
        for job_id in job_ids:
            pipe.hmget(rq_jobs.job_key(job_id), "meta", "started_at", "worker_name", "status")
        replies = pipe.execute(raise_on_error=False)
    return [_progress(*reply) if isinstance(reply, list) else Progress(0, 0) for reply in replies]


def _progress(meta: Any, started_at: bytes | None, worker: bytes | None, status: bytes | None) -> Progress:
    told = stored.json_object(meta)
    rows, tokens, shard_rows = (stored.count(told.get(name)) or 0 for name in ("rows_done", "tokens", "rows"))
    tokens += stored.count(told.get("tokens_open")) or 0
    return Progress(rows, tokens, shard_rows, stored.moment(started_at), safe_name(worker or b""), status is not None)
