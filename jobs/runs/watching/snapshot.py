"""What Redis knows of a run at one moment, in a few round trips however many shards it has."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import Any, cast

from redis import Redis

from jobs.common import rq_jobs, stored
from jobs.common.display import MAX_TEXT_CHARS, safe_name
from jobs.common.keys import run_key
from jobs.common.rq_jobs import JobStatus
from jobs.errors import FAULT_PREFIX, UnknownRun
from jobs.runs.plans.names import job_shard, shard_job_id
from jobs.runs.redis_state.run_jobs import num_held, read_earlier
from jobs.runs.redis_state.state import OF_SUBMISSION, OF_TIME, PLAN_ERROR, TOTALS, RunState
from jobs.runs.redis_state.submission import ErrorLimit
from jobs.runs.statistics.part_stats import COUNTED, outcome_text
from jobs.runs.watching.listeners import Listener, living_workers, served_on
from jobs.runs.watching.time_left import Progress, time_left

#: States of a job that has not ended.
WAITING = (JobStatus.QUEUED, JobStatus.STARTED, JobStatus.SCHEDULED, JobStatus.DEFERRED)

#: States of a planning job that has ended without a plan.
REFUSED = (JobStatus.FAILED, JobStatus.STOPPED, JobStatus.CANCELED)

#: Shards of which one look seeks the jobs, and entries that it reads of a queue's registry of running or failed ones.
MAX_SOUGHT, MAX_ENTRIES = 1000, 20_000

#: What is read of a run's hash.
_FACTS = (
    *("output", "queue", "plan_job", "plan_model", "rows", "shards", "model", "model_text", "max_errors"),
    *("second_queue", "second_model", "second_text", "cancelled", "finished", "stopped", "submission"),
    *("cancelled_submission", PLAN_ERROR, *dict.fromkeys((*TOTALS, *OF_SUBMISSION, *OF_TIME))),
)


@dataclass(frozen=True)
class RunSnapshot:
    """A run's progress. Texts but the queue's name are as they may be shown. rows, shards, model: None until planned.

    gone: queued shards whose job is in Redis no more. claimed: those that a worker holds, which may write the run's
    end. rows_done, tokens: generated ones, of running shards too; other counts are of finished shards. queue_length:
    jobs of any run. awaited_model: the run's, where no worker there serves it. stopped: why it was cancelled without
    anyone's word. failed_jobs: without those that an earlier cancel has stopped, which are gone. left_s: until it ends.
    listened: queues on which any worker does. awaited_second: what is to be done for the second model, whose jobs are
    on second_queue, of a run that asks two. submitted_at, began_at, ended_at: Unix seconds. rows_per_s, tokens_per_s:
    of a finished run over worked_s, for which workers had shards.
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
    listened: tuple[str, ...] = ()
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
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def to_object(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        derived = {"queue": safe_name(self.queue), "state": self.state, "shards_failed": self.shards_failed}
        return {**asdict(self), **derived}

    @property
    def is_active(self) -> bool:
        """Whether it moves on, or waits to."""
        return self.state in ("planning", "running", "ending")

    @property
    def shards_failed(self) -> int:
        """Return how many shards failed; 0 of a run that is cancelled or stopped."""
        return 0 if self.cancelled else self.failed

    @property
    def shards_left(self) -> int:
        """Return how many shards nobody computes until the run is submitted again."""
        if self.state not in ("cancelled", "stopped"):
            return 0
        return max(0, (self.shards or 0) - self.shards_done - self.shards_started)

    @property
    def failed(self) -> int:
        return len(self.failed_jobs)

    @property
    def queued(self) -> int:
        return max(0, (self.shards or 0) - self.shards_done - self.shards_started - self.failed - self.gone)

    @property
    def outcome(self) -> str:
        """Say of how many rows in finished shards there is no good answer."""
        return outcome_text(self.errors, self.failed_checks, self.cut)

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
    def waits(self) -> bool:
        """Whether something of it is to be taken by a worker: a started shard too, once the worker is gone."""
        return self.is_planning or self.queued > 0 or self.shards_started > 0

    @property
    def awaits_plan(self) -> bool:
        """Whether the run is planned now, or has to be before it moves on; shards that run count as its progress."""
        return self.is_planning and (self.plan_status is JobStatus.STARTED or not self.shards_started)

    @property
    def is_idle(self) -> bool:
        """Whether no job of the run waits or runs."""
        if self.is_planning or self.shards_started or self.claimed:
            return False
        if self.shards is None:
            return self.plan_status is None  # someone deleted its planning
        # On an empty queue no shard waits: someone emptied it. Of a run whose parts are all there the shard
        # may wait that was to end it, as its worker died.
        return not ((self.queued or self.shards_done >= self.shards) and self.queue_length)

    @property
    def state(self) -> str:
        """One word for an operator."""
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
        return "failed" if self.failed or self.gone else "ending"


@dataclass(frozen=True)
class Look:
    """What Redis tells of a run, its queues and all workers.

    facts: of its hash. shards_done: how many parts it has. started, failed: jobs of its shards, none once it has
    finished. queue_length: jobs of any run.
    """

    run: str
    facts: Mapping[str, str]
    shards_done: int
    plan_status: JobStatus | None
    started: Mapping[int, str]
    failed: Mapping[int, str]
    queue_length: int
    workers: Sequence[Listener]

    @property
    def counts(self) -> dict[str, int]:
        """Return what its parts have together; one may lack whose worker was killed as it recorded it."""
        return {name: self.number(total) or 0 for name, total in zip(COUNTED, TOTALS, strict=True)}

    def number(self, name: str) -> int | None:
        return stored.count(self.facts.get(name))


def look_at(connection: Redis, runs: Sequence[str]) -> list[Look]:
    """Look at runs, in few round trips however many; those of which Redis knows no more than their id are left out."""
    with connection.pipeline(transaction=False) as pipe:
        for run in runs:
            pipe.hmget(run_key(run), _FACTS)
            pipe.hlen(run_key(run, "parts"))
        replies = pipe.execute()
        known = list[tuple[str, dict[str, str], int]]()
        most = dict[str, int]()  # entries of each queue's registries
        for run, values, length in zip(runs, replies[::2], replies[1::2], strict=True):
            facts = {name: stored.text(each) for name, each in zip(_FACTS, values, strict=True) if each is not None}
            if facts.keys() >= {"output", "queue"}:
                known.append((run, facts, length))
                for name in _queues_of(facts):
                    most[name] = max(most.get(name, 1), 1 if "finished" in facts else MAX_ENTRIES)
        for _, facts, _ in known:
            pipe.hget(rq_jobs.job_key(facts.get("plan_job", "")), "status")
        for name, entries in most.items():  # in the order in which jobs move on, so none is missed
            keys = rq_jobs.QueueKeys(name)
            pipe.llen(keys.waiting)
            pipe.llen(keys.popped)
            pipe.zrange(keys.started, 0, entries - 1)
            pipe.zrevrange(keys.failed, 0, entries - 1)
        replies = pipe.execute()
    statuses, replies = replies[: len(known)], replies[len(known) :]
    queues = {name: replies[4 * place : 4 * place + 4] for place, name in enumerate(most)}
    workers, found = living_workers(connection), []
    for (run, facts, parts), status in zip(known, statuses, strict=True):
        waiting, popped, started, failed = zip(*(queues[name] for name in _queues_of(facts)), strict=True)
        begun, lost = ({} if "finished" in facts else shards_of(run, chain(*each)) for each in (started, failed))
        length = sum(waiting + popped)
        found.append(Look(run, facts, parts, rq_jobs.job_status(status), begun, lost, length, workers))
    return found


def _queues_of(facts: Mapping[str, str]) -> list[str]:
    """Return the queue of a run's jobs, and that of those which ask the second model of a cascade."""
    return list(dict.fromkeys((facts["queue"], facts.get("second_queue", facts["queue"]))))


def look_at_one(connection: Redis, run: str) -> Look:
    """Look at a run. Raises UnknownRun when this Redis has no such run."""
    for found in look_at(connection, [run]):
        return found
    raise UnknownRun(run)


def read_snapshot(connection: Redis, run: str) -> RunSnapshot:
    """Read a run's progress, and what holds it up. Raises UnknownRun when this Redis has no such run."""
    look = look_at_one(connection, run)
    facts, started, shards, plan_status = look.facts, look.started, look.number("shards"), look.plan_status
    parts = RunState(connection, run).look(started, look.counts)  # later: what ends in between is done, not nowhere
    running = {shard: job_id for shard, job_id in started.items() if shard not in parts.shards}
    # A failed job of a shard with a part was another execution's; or it failed to end a run that is whole.
    is_unended = len(parts.shards) >= (shards or 1) and not started
    done = frozenset() if is_unended else parts.shards
    failed = tuple(look.failed[shard] for shard in sorted(look.failed.keys() - done - running.keys()))
    cancelled = look.number("cancelled_submission")  # which has stopped the jobs enqueued before
    seen = read_earlier(connection, failed, at_once=False) if cancelled and failed else []
    stopped = {job.id for job in seen if job.submission <= (cancelled or 0)}
    progress = read_progress(connection, list(running.values()))
    silent = {each.worker for each in progress} - {each.name for each in look.workers if not each.is_silent}
    alive = {shard: each for shard, each in zip(running, progress, strict=True) if each.worker not in silent}
    claimed = gone = 0
    if shards and not running and "finished" not in facts:
        rest = [shard for shard in range(shards) if shard not in parts.shards]
        if not look.queue_length:
            kinds = (False, True) if "second_queue" in facts else (False,)
            jobs = (shard_job_id(run, shard, is_second) for shard in rest or range(shards) for is_second in kinds)
            claimed = num_held(connection, jobs)
        if "cancelled" not in facts and plan_status not in WAITING:
            lost = [shard for shard in rest if shard not in look.failed][:MAX_SOUGHT]
            sought = list(map(rq_jobs.job_key, shard_jobs(connection, run, lost, facts)))
            there: Any = connection.exists(*sought) if sought else 0
            gone = len(sought) - int(there) + len(stopped)
    snapshot = snapshot_of(
        look,
        progress,
        shards_done=len(parts.shards),
        claimed=claimed,
        failed_jobs=tuple(job for job in failed if job not in stopped),
        plan_error=_plan_error(connection, look, shards),
        gone=gone,
        silent_workers=tuple(sorted(silent)),
        awaited_second=_awaited_second(look),
    )
    if snapshot.state != "running":
        return snapshot
    sizes = cast("bytes | None", connection.hget(run_key(run), "sizes"))
    return replace(snapshot, left_s=time_left(sizes, shards, snapshot.rows, parts, alive, time.time()))


def snapshot_of(look: Look, progress: Sequence[Progress], **known: Any) -> RunSnapshot:
    """Return a run as it was seen. progress: of its running shards. known: what else is known of it."""
    facts, counts, rows = look.facts, look.counts, look.number("rows")
    workers, models = served_on(look.workers, facts["queue"])
    began_at, ended_at, worked_s = (float(facts[name]) if name in facts else None for name in OF_TIME)
    more_rows, more_tokens = sum(each.rows for each in progress), sum(each.tokens for each in progress)
    rows_done, is_finished = counts["rows"] + more_rows, "finished" in facts
    limit = ErrorLimit.parse(facts.get("max_errors"))
    worked_s, end = (worked_s, ended_at) if is_finished else (None, time.time())
    if worked_s:
        seconds, by_then = worked_s, [counts["rows"], counts["generated_tokens"]]
    else:
        seconds = 0.0 if began_at is None or end is None else end - began_at
        by_then = [look.number(name) or 0 for name in ("judged_rows", "judged_tokens")]
    texts = ("output", "stopped", "model_text", PLAN_ERROR)
    shown = {name: safe_name(facts[name], MAX_TEXT_CHARS) for name in texts if name in facts}
    known = {"plan_error": shown.get(PLAN_ERROR), "shards_done": look.shards_done, **known}
    known |= {name: counts[name] for name in COUNTED if name not in ("rows", "generated_tokens")}
    return RunSnapshot(
        run=look.run,
        output=shown["output"],
        queue=facts["queue"],
        cancelled="cancelled" in facts,
        finished=is_finished,
        plan_job=facts.get("plan_job"),
        plan_status=look.plan_status,
        rows=rows,
        shards=look.number("shards"),
        shards_started=len(progress),
        rows_done=rows_done if rows is None else min(rows_done, rows),  # totals may have a part twice
        tokens=counts["generated_tokens"] + more_tokens,
        workers=workers,
        queue_length=look.queue_length,
        awaited_model=_awaited_model(look, models),
        stopped=shown.get("stopped"),
        too_many_errors=limit.told(counts["rows"], counts["errors"], is_whole=is_finished),
        model=shown.get("model_text"),
        submitted_at=(look.number("submission") or 0) / 1000 or None,  # its number is when it came
        began_at=began_at,
        ended_at=ended_at,
        worked_s=worked_s,
        rows_per_s=(by_then[0] + more_rows) / seconds if seconds > 0 else None,
        tokens_per_s=(by_then[1] + more_tokens) / seconds if seconds > 0 else None,
        listened=tuple(sorted({name for each in look.workers for name in each.queues})),
        second_queue=facts.get("second_queue"),
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


def _plan_error(connection: Redis, look: Look, shards: int | None) -> str | None:
    """Return why a run's planning failed, as it may be shown; None where it did not."""
    facts, status = look.facts, look.plan_status
    if status in (JobStatus.STOPPED, JobStatus.CANCELED):
        return "it was stopped"
    if status is JobStatus.FAILED:
        return failure_text(connection, facts["plan_job"])
    if status is None and PLAN_ERROR in facts:
        return safe_name(facts[PLAN_ERROR], MAX_TEXT_CHARS)
    if status is None and shards is None and "cancelled" not in facts:
        return f"its job is gone from queue {facts['queue']!r}, which was emptied perhaps: submit it again"
    return None


def _awaited_model(look: Look, models: Collection[str] | None) -> str | None:
    """Return the model, as it is shown, that a run's next step needs and no worker of its queue serves."""
    facts = look.facts
    needed, name = ("plan_model", "plan_model") if look.plan_status in WAITING else ("model", "model_text")
    if needed not in facts or models is None or facts[needed] in models:
        return None
    return safe_name(facts[name], MAX_TEXT_CHARS)


def _awaited_second(look: Look) -> str | None:
    """Say that nobody serves the second model of a cascade, where that is so."""
    if (queue := look.facts.get("second_queue")) is None:
        return None
    _, models = served_on(look.workers, queue)
    if models is None or look.facts["second_model"] in models:
        return None
    model = safe_name(look.facts["second_text"], MAX_TEXT_CHARS)
    return f"no worker on queue {queue!r} serves model {model}, which is asked again: start one there"


def failure_text(connection: Redis, job_id: str) -> str:
    """Return the last line of a failed job's error, before the line that classes it, or that it left none."""
    return error_line(rq_jobs.last_error(connection, job_id)) or "it left no error"


def error_line(error: str) -> str:
    """Return the last line of an error as it may be shown, before the line that classes it; "" for none."""
    lines = [each for each in error.strip().splitlines() if not each.startswith(FAULT_PREFIX)]
    return safe_name(lines[-1], MAX_TEXT_CHARS) if lines else ""


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
    there = {job.id for job in read_earlier(connection, second, at_once=False)}
    return [after if after in there else job_id for job_id, after in zip(ids, second, strict=True)]


def read_progress(connection: Redis, job_ids: Sequence[str]) -> list[Progress]:
    """Return the progress of running shards' jobs; none where a job says none."""
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
