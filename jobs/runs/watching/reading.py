"""Reads runs: what Redis has of them at one moment, in a few round trips however many those are."""

import time
from bisect import bisect
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from redis import Redis

from jobs.common import rq_jobs, stored
from jobs.common.display import MAX_TEXT_CHARS, safe_name
from jobs.common.keys import PROGRESS_FIELD, RUNS_KEY, SUBMISSION_FIELD, run_key
from jobs.common.rq_jobs import JobStatus
from jobs.common.workers import Worker, are_held, read_workers, served_on
from jobs.errors import FAULT_PREFIX, UnknownRun
from jobs.runs.plans.names import run_and_shard, shard_job_id
from jobs.runs.redis_state.shard_jobs import num_held
from jobs.runs.redis_state.state import OF_SUBMISSION, PLAN_ERROR, REUSE_DIFFERS, TOTALS, RunState, recorded_reasons
from jobs.runs.redis_state.submission import ErrorLimit
from jobs.runs.statistics.run_statistics import COUNTED, Reason
from jobs.runs.watching.snapshot import WAITING, RunSnapshot
from jobs.runs.watching.time_left import PartsDone, Progress, time_left

#: Shards of a run whose jobs are sought where none runs, and done ones by which the time left is told.
MAX_SOUGHT = MAX_LOOKED = 1000

MAX_RUNS = 200
MAX_REASONS = 20
#: For a list, entries that are read of a queue's registry of running or failed jobs.
MAX_ENTRIES = 20_000

_FACTS = (
    *("output", "queue", "plan_job", "plan_model", "rows", "shards", "model", "model_text", "max_errors"),
    *("second_queue", "second_model", "second_text", "cancelled", "finished", "stopped", "submission"),
    *("cancelled_submission", "worked_s", "format", PLAN_ERROR, REUSE_DIFFERS),
)
_TIMES = ("began_at", "ended_at", "worked_s")
_COUNTS = (*TOTALS, *OF_SUBMISSION)


class RunLook:
    """What one look has seen of a run so far. done: how many shards have a part. stopped: failed jobs of a cancel."""

    done = claimed = gone = 0
    progress: Sequence[Progress] = ()
    stopped: Collection[str] = ()

    def __init__(self, run: str, facts: dict[str, str], plan_status: JobStatus | None) -> None:
        self.run, self.facts, self.plan_status = run, facts, plan_status
        self.queues = list(dict.fromkeys((facts["queue"], facts.get("second_queue", facts["queue"]))))
        self.shards, self.is_finished = stored.count(facts.get("shards")), "finished" in facts

    def see_queues(self, queues: Mapping[str, Sequence[Any]]) -> None:
        """See how many jobs of anybody's wait, and the shards' jobs that are held, or have failed."""
        lengths, started, failed = zip(*(queues[name] for name in self.queues), strict=True)
        self.length = sum(lengths)
        self.started, self.failed = (
            {shard: job for each in jobs for shard, job in each.get(self.run, {}).items()} for jobs in (started, failed)
        )

    def see_parts(self, counts: Mapping[str, str], num_parts: int, with_part: Collection[int]) -> None:
        """Leave out jobs of shards with a part, which were another execution's. with_part: of those with jobs."""
        self.facts |= counts
        self.counts = {name: _number(counts, f"total_{name}") for name in COUNTED}
        self.done = num_parts
        # A failed job of a shard with a part may have failed to end a run that is whole.
        is_unended = num_parts >= (self.shards or 1) and not self.is_finished and not self.started
        self.running = {shard: job for shard, job in self.started.items() if shard not in with_part}
        others = self.running if is_unended else {*self.running, *with_part}
        self.failed = {shard: self.failed[shard] for shard in sorted(self.failed.keys() - others)}

    def see_stopped(self, connection: Redis) -> None:
        """See which failed jobs an earlier cancel has stopped."""
        cancelled, failed = _number(self.facts, "cancelled_submission"), list(self.failed.values())
        with connection.pipeline(transaction=False) as pipe:
            for job_id in failed if cancelled else ():
                pipe.hget(rq_jobs.job_key(job_id), SUBMISSION_FIELD)
            numbers = [stored.count(stored.text(each or b"")) or 0 for each in pipe.execute()]
        self.stopped = {job_id for job_id, number in zip(failed, numbers, strict=False) if number <= cancelled}

    @property
    def is_still(self) -> bool:
        """Whether no shard of the planned run is seen to run, though the run goes on."""
        is_over = self.is_finished or "cancelled" in self.facts
        return bool(self.shards) and not self.running and not is_over and self.plan_status not in WAITING

    @property
    def is_stalled(self) -> bool:
        """Whether shards wait, nobody works on any, and none has failed."""
        is_over = self.is_finished or "cancelled" in self.facts or bool(self.failed)
        return bool(self.shards) and not self.progress and not is_over and self.done < (self.shards or 0)

    def seek(self, connection: Redis) -> None:
        """Look where the shards' jobs are, of which no queue tells."""
        recorded, planned = RunState(connection, self.run).recorded(), range(self.shards or 0)
        rest = [shard for shard in planned if shard not in recorded]
        kinds = (False, True) if "second_queue" in self.facts else (False,)
        if not self.length:
            jobs = (shard_job_id(self.run, shard, kind) for shard in rest or planned for kind in kinds)
            self.claimed = num_held(connection, jobs)
        with connection.pipeline(transaction=False) as pipe:
            for shard in [each for each in rest if each not in self.failed][:MAX_SOUGHT]:
                pipe.exists(*(rq_jobs.job_key(shard_job_id(self.run, shard, kind)) for kind in kinds))
            self.gone = pipe.execute().count(0) + len(self.stopped)

    def snapshot(self, connection: Redis, workers: Collection[Worker]) -> RunSnapshot:
        facts, progress, counts = self.facts, self.progress, self.counts
        needed = ("plan_model", "plan_model") if self.plan_status in WAITING else ("model", "model_text")
        rows = stored.count(facts.get("rows"))
        rows_done, tokens = (sum(getattr(each, name) for each in progress) for name in ("rows", "tokens"))
        began_at, ended_at, worked_s = (stored.seconds(facts.get(name)) for name in _TIMES)
        worked_s, end = (worked_s, ended_at) if self.is_finished else (None, time.time() if progress else ended_at)
        if worked_s:
            seconds, by_then = worked_s, [counts["rows"] - counts["rows_reused"], counts["generated_tokens"]]
        elif self.is_stalled:
            seconds, by_then = 0.0, [0, 0]  # no rate: an earlier one does not show how it goes now
        else:
            seconds = 0.0 if began_at is None or end is None else end - began_at
            by_then = [_number(facts, name) for name in ("judged_rows", "judged_tokens")]
        return RunSnapshot(
            run=self.run,
            output=safe_name(facts["output"], MAX_TEXT_CHARS),
            queue=facts["queue"],
            second_queue=facts.get("second_queue"),
            cancelled="cancelled" in facts,
            finished=self.is_finished,
            plan_job=facts.get("plan_job"),
            plan_status=self.plan_status,
            plan_error=self._plan_error(connection),
            rows=rows,
            rows_done=counts["rows"] + rows_done if rows is None else min(counts["rows"] + rows_done, rows),
            tokens=counts["generated_tokens"] + tokens,
            shards=self.shards,
            shards_done=self.done,
            shards_started=len(progress),
            claimed=self.claimed,
            gone=self.gone,
            failed_jobs=tuple(job for job in self.failed.values() if job not in self.stopped),
            workers=served_on(workers, facts["queue"])[0],
            queue_length=self.length,
            listened=tuple(sorted({name for each in workers for name in each.queues})),
            silent_workers=tuple(sorted({each.worker for each in progress} - _alive(workers))),
            is_held=are_held(worker for worker in workers if facts["queue"] in worker.queues),
            awaited_model=self._awaited(workers, facts["queue"], *needed),
            awaited_second=self._awaited(workers, self.queues[-1], "second_model", "second_text"),
            planned_by=self._planned_by(workers),
            stopped=_shown(facts, "stopped"),
            reuse_differs=_shown(facts, REUSE_DIFFERS),
            too_many_errors=ErrorLimit.stored(facts.get("max_errors")).told(
                counts["rows"], counts["errors"], is_whole=self.is_finished
            ),
            model=_shown(facts, "model_text"),
            submitted_at=_number(facts, "submission") / 1000 or None,  # its number is when it came
            began_at=began_at,
            ended_at=ended_at,
            worked_s=worked_s,
            rows_per_s=(by_then[0] + rows_done) / seconds if seconds > 0 else None,
            tokens_per_s=(by_then[1] + tokens) / seconds if seconds > 0 else None,
            **{name: counts[name] for name in COUNTED if name not in ("rows", "generated_tokens")},
        )

    def left_s(self, connection: Redis, workers: Collection[Worker]) -> float | None:
        """Return the time left, by the parts that were done last; None while nobody works on the run."""
        state, alive = RunState(connection, self.run), _alive(workers)
        told = zip(self.running, self.progress, strict=True)
        running = {shard: each for shard, each in told if each.worker in alive}
        recorded = state.recorded()
        ordered = sorted(recorded)  # the last ones, as far as numbers tell, are those before the ones under way
        at = bisect(ordered, max(self.running, default=-1))
        latest = state.parts_of([*ordered[at:], *ordered[:at]][-MAX_LOOKED:])
        shares: Any = connection.hget(run_key(self.run), "sizes")
        rows, done = stored.count(self.facts.get("rows")), PartsDone(recorded, latest, self.counts)
        left_s = time_left(shares, self.shards, rows, done, running, time.time())
        return None if self.is_stalled else left_s

    def _plan_error(self, connection: Redis) -> str | None:
        facts, status = self.facts, self.plan_status
        if status in (JobStatus.STOPPED, JobStatus.CANCELED):
            return "it was stopped"
        if status is JobStatus.FAILED:
            return failure_text(connection, facts["plan_job"])
        if status is None and PLAN_ERROR in facts:
            return _shown(facts, PLAN_ERROR)
        if status is None and self.shards is None and "cancelled" not in facts:
            return f"its job is gone from queue {facts['queue']!r}, which was emptied perhaps: submit it again"
        return None

    def _awaited(self, workers: Collection[Worker], queue: str, needed: str, shown: str) -> str | None:
        """Return a model, as it is shown, that is needed and that no worker of the queue serves."""
        _, models = served_on(workers, queue)
        is_awaited = models is not None and needed in self.facts and self.facts[needed] not in models
        return _shown(self.facts, shown) if is_awaited else None

    def _planned_by(self, workers: Collection[Worker]) -> str | None:
        """Return "newer" or "older": the version of the plan, if no worker of the queue reads it; else None."""
        on_queue = [each for each in workers if self.facts["queue"] in each.queues and not each.is_silent]
        formats = {each.sample.format for each in on_queue if each.sample is not None and each.sample.format}
        own = stored.count(self.facts.get("format"))
        if not formats or own is None or own in formats:
            return None
        return "newer" if own > max(formats) else "older"


def read_runs(connection: Redis, runs: Iterable[str], most: int = 0) -> list[RunSnapshot]:
    """Return how those of the runs stand that Redis knows.

    most: of a list, entries that are read of a queue's registry. 0: all are, and of each run it is told how long it
    goes on, and which of its jobs are gone though others are on its queue.
    """
    looks = begin_looks(connection, runs)
    workers = [each for each in read_workers(connection) if each.queues]
    busy = {name for look in looks if not look.is_finished for name in look.queues}
    names = {name for look in looks for name in look.queues}
    queues = {name: read_queue(connection, name, most if name in busy else 1) for name in names}
    for look in looks:
        look.see_queues(queues)
    _read_parts(connection, looks)  # afterwards: what ends in between is done, and not nowhere
    found = []
    for look in looks:
        look.progress = read_progress(connection, list(look.running.values()))
        look.see_stopped(connection)
        left = 0 if look.shards is None else look.shards - look.done - len(look.failed)
        if look.is_still and (not most or left > look.length):
            look.seek(connection)
        snapshot = look.snapshot(connection, workers)
        if not most and snapshot.state == "running":
            snapshot = replace(snapshot, left_s=look.left_s(connection, workers))
        found.append(snapshot)
    return found


def read_snapshot(connection: Redis, run: str) -> RunSnapshot:
    """Read a run's progress. Raises UnknownRun when this Redis has no such run."""
    for found in read_runs(connection, [run]):
        return found
    raise UnknownRun(run)


def read_planned(connection: Redis, run: str) -> RunSnapshot:
    """Read a run's progress, or that of the run planned for it where the worker's real paths differ."""
    snapshot = read_snapshot(connection, run)
    if snapshot.shards is None and snapshot.plan_job is not None and not snapshot.is_planning:
        planned = rq_jobs.last_value(connection, snapshot.plan_job).get("run", run)
        if planned != run:
            return read_snapshot(connection, planned)
    return snapshot


def list_runs(connection: Redis, limit: int = MAX_RUNS, states: Collection[str] = ()) -> list[RunSnapshot]:
    """Return at most `limit` runs in these states, any for (), the last submitted first. Raises RedisError."""
    newest: Any = connection.zrevrange(RUNS_KEY, 0, limit - 1)
    found = read_runs(connection, map(stored.text, newest), MAX_ENTRIES)
    return [each for each in found if not states or each.state in states]


def run_reasons(connection: Redis, run: str) -> list[Reason]:
    """Return why rows of a run have an error, the commonest first, at most MAX_REASONS kinds, fit to be shown."""
    found = recorded_reasons(connection, run).commonest(MAX_REASONS)
    return [replace(each, text=safe_name(each.text, MAX_TEXT_CHARS)) for each in found]


def failure_text(connection: Redis, job_id: str) -> str:
    """Return the last line of a failed job's error, before the line that classes it, or that it left none."""
    return error_line(rq_jobs.error_text(rq_jobs.last_entry(connection, job_id))) or "it left no error"


def error_line(error: str) -> str:
    """Return the last line of an error as it may be shown, before the line that classes it; "" for none."""
    lines = [each for each in error.strip().splitlines() if not each.startswith(FAULT_PREFIX)]
    return safe_name(lines[-1], MAX_TEXT_CHARS) if lines else ""


def read_progress(connection: Redis, job_ids: Sequence[str]) -> list[Progress]:
    with connection.pipeline(transaction=False) as pipe:
        for job_id in job_ids:
            pipe.hmget(rq_jobs.job_key(job_id), PROGRESS_FIELD, "started_at", "worker_name", "status")
        replies = pipe.execute(raise_on_error=False)
    return [_progress(*reply) if isinstance(reply, list) else Progress(0, 0) for reply in replies]


def _progress(shown: Any, started_at: bytes | None, worker: bytes | None, status: bytes | None) -> Progress:
    told = stored.json_object(shown)
    rows, tokens, shard_rows = (stored.count(told.get(name)) or 0 for name in ("rows_done", "tokens", "rows"))
    tokens += stored.count(told.get("tokens_open")) or 0
    return Progress(rows, tokens, shard_rows, stored.moment(started_at), safe_name(worker or b""), status is not None)


def begin_looks(connection: Redis, runs: Iterable[str]) -> list[RunLook]:
    """Begin a look at each run of which more is left than its id."""
    names = list(runs)
    with connection.pipeline(transaction=False) as pipe:
        for run in names:
            pipe.hmget(run_key(run), _FACTS)
        replies = zip(names, pipe.execute(raise_on_error=False), strict=True)  # producers may write there
        told = {run: _texts(_FACTS, values) for run, values in replies if isinstance(values, list)}
        found = {run: facts for run, facts in told.items() if facts.keys() >= {"output", "queue"}}
        for facts in found.values():
            pipe.hget(rq_jobs.job_key(facts.get("plan_job", "")), "status")
        statuses = map(rq_jobs.job_status, pipe.execute(raise_on_error=False))
    return [RunLook(run, facts, status) for (run, facts), status in zip(found.items(), statuses, strict=True)]


def read_queue(connection: Redis, name: str, most: int) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """Look at a queue in the order in which jobs move on, so none is missed: how many wait, are held, have failed."""
    keys = rq_jobs.QueueKeys(name)
    with connection.pipeline(transaction=False) as pipe:
        pipe.llen(keys.waiting)
        pipe.llen(keys.popped)
        pipe.zrange(keys.started, 0, most - 1)
        pipe.zrevrange(keys.failed, 0, most - 1)
        waiting, popped, started, failed = pipe.execute()
    return waiting + popped, _jobs_by_run(started), _jobs_by_run(failed)


def _read_parts(connection: Redis, looks: Sequence[RunLook]) -> None:
    asked: list[list[Any]] = [["total", *{*look.started, *look.failed}] for look in looks]
    with connection.pipeline(transaction=False) as pipe:
        for look, fields in zip(looks, asked, strict=True):
            pipe.hmget(run_key(look.run), _COUNTS)
            pipe.hlen(run_key(look.run, "parts"))
            pipe.hmget(run_key(look.run, "parts"), fields)
        replies = pipe.execute()
    for look, (_, *shards), counts, length, parts in zip(looks, asked, *(replies[i::3] for i in range(3)), strict=True):
        has_total, *records = (each is not None for each in parts)
        with_part = {int(shard) for shard, there in zip(shards, records, strict=True) if there}
        look.see_parts(_texts(_COUNTS, counts), length - has_total, with_part)


def _jobs_by_run(entries: Iterable[bytes]) -> dict[str, dict[int, str]]:
    """Return of a registry's entries, `<job>` or `<job>:<execution>`, each run's shards and their jobs' ids."""
    found: dict[str, dict[int, str]] = {}
    for entry in entries:
        job_id = stored.text(entry).partition(":")[0]
        run, shard = run_and_shard(job_id) or ("", None)
        if shard is not None:
            found.setdefault(run, {})[shard] = job_id
    return found


def _alive(workers: Collection[Worker]) -> set[str]:
    return {each.name for each in workers if not each.is_silent}


def _texts(names: Sequence[str], values: Sequence[bytes | None]) -> dict[str, str]:
    return {name: stored.text(value) for name, value in zip(names, values, strict=True) if value is not None}


def _shown(facts: Mapping[str, str], name: str) -> str | None:
    return safe_name(facts[name], MAX_TEXT_CHARS) if name in facts else None


def _number(facts: Mapping[str, str], name: str) -> int:
    return stored.count(facts.get(name)) or 0
