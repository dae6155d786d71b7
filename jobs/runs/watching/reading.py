"""Reads the state of runs from Redis. This takes a few round trips, however many runs there are."""

import time
from bisect import bisect
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

from redis import Redis

from jobs.common import rq_jobs, stored
from jobs.common.display import MAX_TEXT_CHARS, safe_name
from jobs.common.keys import PROGRESS_FIELD, REPORTED_AT, RUNS_KEY, SUBMISSION_FIELD, run_key
from jobs.common.rq_jobs import JobStatus
from jobs.common.workers import (
    LOADING,
    Worker,
    are_held,
    are_suspended,
    listening_on,
    models_on,
    other_lengths,
    read_workers,
)
from jobs.context.adapters import shown_adapter
from jobs.errors import FAULT_PREFIX, UnknownRun
from jobs.runs.plans.names import run_and_shard, shard_job_id
from jobs.runs.redis_state.shard_jobs import num_held
from jobs.runs.redis_state.state import (
    PLAN_ERROR,
    REUSE_DIFFERS,
    SUBMISSION_TOTALS,
    SUBMITTED_BY,
    TOTALS,
    RunState,
    recorded_reasons,
)
from jobs.runs.redis_state.submission import DEADLINE, ErrorLimit
from jobs.runs.statistics.run_statistics import COUNTED, Reason
from jobs.runs.watching.snapshot import WAITING, RunSnapshot
from jobs.runs.watching.time_left import PartsDone, Progress, time_left

#: The most shards whose jobs are looked for one by one, if no shard is seen to run.
MAX_SOUGHT = 1000
#: The most finished shards from which the time left is estimated.
MAX_LOOKED = 200
#: Somebody still counts as working on a run if its last shard ended less than this long ago.
BETWEEN_SHARDS_S = 10.0

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


class QueueLook(NamedTuple):
    """The jobs of one queue at one moment.

    length: the number of waiting jobs of all runs. started, failed: the ids of shards' jobs, by run and shard.
    """

    length: int
    started: Mapping[str, Mapping[int, str]]
    failed: Mapping[str, Mapping[int, str]]


class _Measured(NamedTuple):
    """Rows and tokens of finished shards, and the seconds in which they were computed."""

    rows: int
    tokens: int
    seconds: float


class RunLook:
    """Collects what one look sees of a run. Call `see_queues`, then `see_parts` and the others.

    length: the number of waiting jobs of all runs on the run's queues.
    started, failed: the ids of jobs that run or have failed, by shard. running: those of `started` without a part.
    done: the number of shards that have a part. claimed: the number of the run's jobs that a worker holds.
    gone: the number of shards that have neither a part nor a job in Redis.
    progress: the progress of the running shards, in their order.
    is_worked_on: whether shards run or one has just ended, and a worker of its queues lives.
    stopped: the ids of failed jobs that an earlier cancel has stopped.
    """

    done = 0
    claimed = 0
    gone = 0
    progress: Sequence[Progress] = ()
    is_worked_on = False
    stopped: Collection[str] = ()

    def __init__(self, run: str, facts: dict[str, str], plan_status: JobStatus | None) -> None:
        self.run = run
        self.facts = facts
        self.plan_status = plan_status
        self.queues = [facts["queue"]]
        second_queue = facts.get("second_queue", facts["queue"])
        if second_queue not in self.queues:
            self.queues.append(second_queue)
        self.shards = stored.count(facts.get("shards"))
        self.is_finished = "finished" in facts

    def see_queues(self, queues: Mapping[str, QueueLook]) -> None:
        """Read from the run's queues how many jobs wait, and which of its own jobs run or have failed."""
        self.length = 0
        self.started: dict[int, str] = {}
        self.failed: dict[int, str] = {}
        for name in self.queues:
            queue = queues[name]
            self.length += queue.length
            self.started.update(queue.started.get(self.run, {}))
            self.failed.update(queue.failed.get(self.run, {}))

    def see_parts(
        self, counts: Mapping[str, str], num_parts: int, with_part: Collection[int]
    ) -> None:
        """Note the run's counts and its number of parts, and forget jobs that the parts have made superfluous.

        with_part: the shards that have a part and also a running or failed job. Another execution has written the part.
        """
        self.facts |= counts
        self.counts = {name: _number(counts, f"total_{name}") for name in COUNTED}
        self.done = num_parts
        self.running = {shard: job for shard, job in self.started.items() if shard not in with_part}

        # A failed job does not count if its shard runs again, or has a part. But if every shard has a part and the run
        # has not finished, a job has failed while it ended the run.
        has_all_parts = num_parts >= (self.shards or 1)
        failed_at_end = has_all_parts and not self.is_finished and not self.started
        superseded = set(self.running)
        if not failed_at_end:
            superseded.update(with_part)
        still_failed = sorted(self.failed.keys() - superseded)
        self.failed = {shard: self.failed[shard] for shard in still_failed}

    def see_stopped(self, connection: Redis) -> None:
        """Find out which failed jobs an earlier cancel has stopped."""
        cancelled_submission = _number(self.facts, "cancelled_submission")
        if not cancelled_submission:
            self.stopped = set()
            return

        failed_ids = list(self.failed.values())
        with connection.pipeline(transaction=False) as pipe:
            for job_id in failed_ids:
                pipe.hget(rq_jobs.job_key(job_id), SUBMISSION_FIELD)
            replies = pipe.execute()
        self.stopped = set()
        for job_id, reply in zip(failed_ids, replies, strict=True):
            submission = stored.count(stored.text(reply or b"")) or 0
            if submission <= cancelled_submission:
                self.stopped.add(job_id)

    @property
    def seems_idle(self) -> bool:
        """Whether the run is planned and not over, and no shard is seen to run."""
        if self.is_finished or "cancelled" in self.facts:
            return False
        is_planned = bool(self.shards) and self.plan_status not in WAITING
        return is_planned and not self.running

    @property
    def has_just_ended_a_shard(self) -> bool:
        """Whether a shard ended so lately that its worker may be about to begin another one."""
        ended_at = stored.seconds(self.facts.get("ended_at"))
        return ended_at is not None and time.time() - ended_at < BETWEEN_SHARDS_S

    @property
    def quiet_s(self) -> float | None:
        """The seconds since a shard reported progress or ended; None if nobody works on the run."""
        if not self.is_worked_on:
            return None
        moments = [stored.seconds(self.facts.get("ended_at"))]
        for progress in self.progress:
            moments += [progress.started_at, progress.reported_at]
        news_at = max((moment for moment in moments if moment is not None), default=None)
        return None if news_at is None else max(0.0, time.time() - news_at)

    @property
    def is_stalled(self) -> bool:
        """Whether shards wait, nobody works on a shard, and no shard has failed."""
        if self.is_finished or "cancelled" in self.facts or self.failed:
            return False
        are_left = self.done < (self.shards or 0)
        return are_left and not self.is_worked_on

    def seek(self, connection: Redis) -> None:
        """Look for the jobs of unfinished shards one by one. Sets `claimed` and `gone`."""
        recorded = RunState(connection, self.run).recorded()
        planned = range(self.shards or 0)
        unfinished = [shard for shard in planned if shard not in recorded]
        # While jobs wait, the run goes on whether or not a worker holds one of its jobs.
        if not self.length:
            # Without unfinished shards, any shard's job may be the one that ends the run.
            shards = unfinished or planned
            job_ids = chain.from_iterable(map(self._job_ids, shards))
            self.claimed = num_held(connection, job_ids)

        sought = [shard for shard in unfinished if shard not in self.failed]
        with connection.pipeline(transaction=False) as pipe:
            for shard in sought[:MAX_SOUGHT]:
                pipe.exists(*map(rq_jobs.job_key, self._job_ids(shard)))
            num_existing = pipe.execute()
        # Nobody runs a stopped job again, so its shard counts as gone too.
        self.gone = num_existing.count(0) + len(self.stopped)

    def _job_ids(self, shard: int) -> list[str]:
        """Return the ids of a shard's jobs: one, or two in a cascade."""
        job_ids = [shard_job_id(self.run, shard)]
        if "second_queue" in self.facts:
            job_ids.append(shard_job_id(self.run, shard, is_second=True))
        return job_ids

    def snapshot(self, connection: Redis, workers: Collection[Worker]) -> RunSnapshot:
        """Return the run's progress. Call it after queues, parts and stopped jobs have been seen."""
        facts = self.facts
        progress = self.progress
        counts = self.counts
        awaited_model = self._awaited(workers, facts["queue"], "model", "model_text")
        if self.plan_status in WAITING:
            awaited_model = self._awaited(workers, facts["queue"], "plan_model", "plan_model")
        submission = _number(facts, "submission")
        submitted_at = submission / 1000 if submission else None  # the number is a time in ms

        rows = stored.count(facts.get("rows"))
        rows_under_way = sum(shard.rows for shard in progress)
        rows_done = counts["rows"] + rows_under_way
        if rows is not None:
            rows_done = min(rows_done, rows)
        tokens_under_way = sum(shard.tokens for shard in progress)

        began_at = stored.seconds(facts.get("began_at"))
        ended_at = stored.seconds(facts.get("ended_at"))
        worked_s = stored.seconds(facts.get("worked_s")) if self.is_finished else None
        rows_per_s = None
        tokens_per_s = None
        measured = self._measured(began_at, ended_at, worked_s)
        if measured is not None:
            rows_per_s = (measured.rows + rows_under_way) / measured.seconds
            tokens_per_s = (measured.tokens + tokens_under_way) / measured.seconds

        limit = ErrorLimit.from_stored(facts.get("max_errors"))
        too_many_errors = limit.excess(
            counts["rows"] - counts["expired"],
            counts["errors"] - counts["expired"],
            is_whole=self.is_finished,
        )

        living = [worker for worker in workers if not worker.is_silent]
        listening = listening_on(living, facts["queue"])
        busy_workers = {shard.worker for shard in progress}
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
            rows_done=rows_done,
            tokens=counts["generated_tokens"] + tokens_under_way,
            shards=self.shards,
            shards_done=self.done,
            shards_started=len(progress),
            claimed=self.claimed,
            gone=self.gone,
            failed_jobs=tuple(job for job in self.failed.values() if job not in self.stopped),
            workers=len(listening),
            queue_length=self.length,
            listened=_queues_of(living),
            silent_workers=tuple(sorted(busy_workers - _alive(workers))),
            is_held=are_held(listening),
            is_suspended=are_suspended(workers),
            awaited_model=awaited_model,
            awaited_adapters=self._awaited_adapters(workers),
            awaited_second=self._awaited(workers, self.queues[-1], "second_model", "second_text"),
            planned_by=self._planned_by(workers),
            stopped=_shown(facts, "stopped"),
            reuse_differs=_shown(facts, REUSE_DIFFERS),
            too_many_errors=too_many_errors,
            deadline=stored.seconds(facts.get(DEADLINE)),
            model=_shown(facts, "model_text"),
            submitted_at=submitted_at,
            submitted_by=_shown(facts, SUBMITTED_BY),
            began_at=began_at,
            ended_at=ended_at,
            worked_s=worked_s,
            quiet_s=self.quiet_s,
            rows_per_s=rows_per_s,
            tokens_per_s=tokens_per_s,
            **{name: counts[name] for name in COUNTED if name not in ("rows", "generated_tokens")},
        )

    def _measured(
        self, began_at: float | None, ended_at: float | None, worked_s: float | None
    ) -> "_Measured | None":
        """Return the rows, tokens and seconds from which the rates are computed; None if the rates are not known.

        A run on which nobody works has no rates, because old ones would mislead. worked_s: see RunSnapshot.
        """
        facts = self.facts
        if worked_s:  # the run has finished
            num_rows = self.counts["rows"] - self.counts["rows_reused"]
            return _Measured(num_rows, self.counts["generated_tokens"], worked_s)
        measured_until = ended_at
        if self.is_worked_on and not self.is_finished:
            measured_until = time.time() - (self.quiet_s or 0.0)  # what is counted was told then
        if self.is_stalled or began_at is None or measured_until is None:
            return None
        if measured_until <= began_at:
            return None
        return _Measured(
            _number(facts, "judged_rows"),
            _number(facts, "judged_tokens"),
            measured_until - began_at,
        )

    def left_s(self, connection: Redis, workers: Collection[Worker]) -> float | None:
        """Estimate the seconds left from the parts that were done last; None while nobody works on the run."""
        if self.is_stalled:
            return None
        # A worker that loads its model has the name of a killed one perhaps, and holds no shards.
        computing = _alive(worker for worker in workers if not _is_loading(worker))
        running: dict[int, Progress] = {}
        for shard, progress in zip(self.running, self.progress, strict=True):
            if progress.worker in computing:
                running[shard] = progress

        # Shards are started in the order of their numbers. So the parts that were done last stand before the shards
        # under way. Parts after the shards under way come from an earlier submission, and count as older.
        state = RunState(connection, self.run)
        recorded = state.recorded()
        in_order = sorted(recorded)
        last_running = max(self.running, default=-1)
        num_before = bisect(in_order, last_running)
        oldest_first = [*in_order[num_before:], *in_order[:num_before]]
        latest = state.parts_of(oldest_first[-MAX_LOOKED:])

        # The field `sizes` holds each shard's share of the run's work.
        shares: Any = connection.hget(run_key(self.run), "sizes")
        rows = stored.count(self.facts.get("rows"))
        parts = PartsDone(recorded, latest, self.counts)
        return time_left(shares, self.shards, rows, parts, running, time.time())

    def _plan_error(self, connection: Redis) -> str | None:
        """Say why the last planning made no plan; None if it made one, or may still make one."""
        facts = self.facts
        status = self.plan_status
        if status in (JobStatus.STOPPED, JobStatus.CANCELED):
            return "it was stopped"
        if status is JobStatus.FAILED:
            return failure_text(connection, facts["plan_job"])
        if status is None and PLAN_ERROR in facts:
            return _shown(facts, PLAN_ERROR)
        if status is None and self.shards is None and "cancelled" not in facts:
            return f"its job is gone from queue {facts['queue']!r}, which perhaps was emptied: submit it again"
        return None

    def _awaited(
        self, workers: Collection[Worker], queue: str, identity_fact: str, text_fact: str
    ) -> str | None:
        """Return the text of the model that the run needs, if no worker of the queue serves the model; else None.

        identity_fact: the name of the fact with the model's identity. text_fact: the name of the fact with its text.
        """
        models = models_on(workers, queue)
        identity = self.facts.get(identity_fact)
        if models is None or identity is None:
            return None
        model, _, _ = identity.partition("\n")  # further lines name adapters
        if model in models:
            return None
        text = _shown(self.facts, text_fact)
        others = other_lengths(workers, queue, identity)
        if text and others:
            return f"{text}, but {others}"
        return text

    def _awaited_adapters(self, workers: Collection[Worker]) -> str | None:
        """Return the run's adapters whose files no worker of its queue has, as texts; None if none is missing."""
        served = models_on(workers, self.facts["queue"])
        if served is None:
            return None
        _, *adapters = self.facts.get("model", "").split("\n")  # the first line names the model
        missing = [shown_adapter(adapter) for adapter in adapters if adapter not in served]
        return safe_name(", ".join(missing), MAX_TEXT_CHARS) if missing else None

    def _planned_by(self, workers: Collection[Worker]) -> str | None:
        """Return the plan's age, "newer" or "older", if no worker of the queue can read its version; else None."""
        readable_formats = set()
        for worker in workers:
            is_listening = self.facts["queue"] in worker.queues and not worker.is_silent
            if is_listening and worker.sample is not None and worker.sample.format:
                readable_formats.add(worker.sample.format)

        plan_format = stored.count(self.facts.get("format"))
        if not readable_formats or plan_format is None or plan_format in readable_formats:
            return None
        return "newer" if plan_format > max(readable_formats) else "older"


def read_runs(connection: Redis, runs: Iterable[str], most: int = 0) -> list[RunSnapshot]:
    """Return the progress of the runs that Redis knows.

    most: the most entries that are read from a queue's registry, for a list of runs. With 0 all entries are read, and
    each run is looked at more closely, to see which of its jobs are gone.
    """
    looks = begin_looks(connection, runs)
    workers = [worker for worker in read_workers(connection) if worker.queues]
    alive = [worker for worker in workers if not worker.is_silent]

    max_entries: dict[str, int] = {}  # by queue
    for look in looks:
        for name in look.queues:
            if not look.is_finished:
                max_entries[name] = most
            max_entries.setdefault(name, 1)  # a finished run needs no entries, and 0 would read all
    queues = {name: read_queue(connection, name, number) for name, number in max_entries.items()}
    for look in looks:
        look.see_queues(queues)
    # Parts are read after the queues. So a shard that ends in between is seen as done, and not as lost.
    _read_parts(connection, looks)

    is_close_look = most == 0
    snapshots = []
    for look in looks:
        look.progress = read_progress(connection, list(look.running.values()))
        queues_of_run = set(look.queues)
        has_worker = any(queues_of_run.intersection(worker.queues) for worker in alive)
        has_work = bool(look.progress) or look.has_just_ended_a_shard
        look.is_worked_on = has_work and has_worker
        look.see_stopped(connection)

        num_left = 0 if look.shards is None else look.shards - look.done - len(look.failed)
        may_lack_jobs = num_left > look.length
        if look.seems_idle and (is_close_look or may_lack_jobs):
            look.seek(connection)
        snapshot = look.snapshot(connection, workers)
        if snapshot.state == "running":
            snapshot = replace(snapshot, left_s=look.left_s(connection, workers))
        snapshots.append(snapshot)
    return snapshots


def read_snapshot(connection: Redis, run: str) -> RunSnapshot:
    """Read a run's progress. Raises UnknownRun when this Redis has no such run."""
    snapshots = read_runs(connection, [run])
    if not snapshots:
        raise UnknownRun(run)
    return snapshots[0]


def read_planned(connection: Redis, run: str) -> RunSnapshot:
    """Read a run's progress. If the worker planned it under another id, read that run instead.

    The id is made of the output's path, and the worker may see another real path than the client.
    """
    snapshot = read_snapshot(connection, run)
    if snapshot.shards is None and snapshot.plan_job is not None and not snapshot.is_planning:
        planned = rq_jobs.last_value(connection, snapshot.plan_job).get("run", run)
        if planned != run:
            return read_snapshot(connection, planned)
    return snapshot


def list_runs(
    connection: Redis, limit: int = MAX_RUNS, states: Collection[str] = ()
) -> list[RunSnapshot]:
    """Return at most `limit` runs, the last submitted first. Raises RedisError.

    states: only runs in these states; all runs if it is empty.
    """
    newest: Any = connection.zrevrange(RUNS_KEY, 0, limit - 1)
    snapshots = read_runs(connection, map(stored.text, newest), MAX_ENTRIES)
    return [snapshot for snapshot in snapshots if not states or snapshot.state in states]


def read_at_risk(connection: Redis, limit: int = MAX_RUNS) -> list[RunSnapshot]:
    """Return the runs that are not expected to end before their deadline, among the last submitted ones.

    limit: how many of the last submitted runs are looked at.
    """
    newest: Any = connection.zrevrange(RUNS_KEY, 0, limit - 1)
    run_ids = list(map(stored.text, newest))
    with connection.pipeline(transaction=False) as pipe:
        for run in run_ids:
            pipe.hmget(run_key(run), DEADLINE, "finished", "cancelled")
        replies = pipe.execute(raise_on_error=False)

    with_deadline = []
    for run, values in zip(run_ids, replies, strict=True):
        if not isinstance(values, list):
            continue  # an error, because producers may write to these keys too
        deadline, finished, cancelled = values
        if deadline and not finished and not cancelled:
            with_deadline.append(run)
    return [run for run in read_runs(connection, with_deadline) if run.deadline_holds is False]


def run_reasons(connection: Redis, run: str) -> list[Reason]:
    """Return why rows of a run have an error: at most MAX_REASONS reasons, the commonest first, safe to show."""
    reasons = recorded_reasons(connection, run).commonest(MAX_REASONS)
    return [replace(reason, text=safe_name(reason.text, MAX_TEXT_CHARS)) for reason in reasons]


def failure_text(connection: Redis, job_id: str) -> str:
    """Return the last line of a failed job's error, or a sentence that says that it left no error."""
    error = rq_jobs.error_text(rq_jobs.last_entry(connection, job_id))
    return error_line(error) or "it left no error"


def error_line(error: str) -> str:
    """Return the last line of an error, safe to show, or "". The line that says whose fault it is does not count."""
    lines = [line for line in error.strip().splitlines() if not line.startswith(FAULT_PREFIX)]
    return safe_name(lines[-1], MAX_TEXT_CHARS) if lines else ""


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
    reported: Any, started_at: bytes | None, worker: bytes | None, status: bytes | None
) -> Progress:
    """Return the progress that the fields of a job's hash tell. reported: what the job has reported, as JSON."""
    shown = stored.json_object(reported)
    tokens_of_answers = stored.count(shown.get("tokens")) or 0
    tokens_open = stored.count(shown.get("tokens_open")) or 0
    return Progress(
        rows=stored.count(shown.get("rows_done")) or 0,
        tokens=tokens_of_answers + tokens_open,
        rows_open=stored.count(shown.get("rows_open")) or 0,
        tokens_open=tokens_open,
        shard_rows=stored.count(shown.get("rows")) or 0,
        started_at=stored.moment(started_at),
        reported_at=stored.seconds(str(shown.get(REPORTED_AT))),
        worker=safe_name(worker or b""),
        has_job=status is not None,
    )


def begin_looks(connection: Redis, runs: Iterable[str]) -> list[RunLook]:
    """Begin a look at each run that Redis knows. A run without an output and a queue is left out."""
    run_ids = list(runs)
    known: dict[str, dict[str, str]] = {}
    with connection.pipeline(transaction=False) as pipe:
        for run in run_ids:
            pipe.hmget(run_key(run), _FACTS)
        # Producers may write to these keys too. So a reply may be an error. Then only that run is left out.
        replies = pipe.execute(raise_on_error=False)
        for run, values in zip(run_ids, replies, strict=True):
            if not isinstance(values, list):
                continue
            facts = _texts(_FACTS, values)
            if facts.keys() >= {"output", "queue"}:
                known[run] = facts

        for facts in known.values():
            pipe.hget(rq_jobs.job_key(facts.get("plan_job", "")), "status")
        statuses = pipe.execute(raise_on_error=False)

    looks = []
    for (run, facts), status in zip(known.items(), statuses, strict=True):
        looks.append(RunLook(run, facts, rq_jobs.job_status(status)))
    return looks


def read_queue(connection: Redis, name: str, most: int) -> QueueLook:
    """Read a queue's waiting, running and failed jobs.

    The places are read in the order in which jobs move on, so that no job is missed. most: the most entries of a
    registry; 0 for all.
    """
    keys = rq_jobs.QueueKeys(name)
    with connection.pipeline(transaction=False) as pipe:
        pipe.llen(keys.waiting)
        pipe.llen(keys.popped)
        last = most - 1  # -1 means the last of all
        pipe.zrange(keys.started, 0, last)
        pipe.zrevrange(keys.failed, 0, last)
        waiting, popped, started, failed = pipe.execute()
    return QueueLook(waiting + popped, _jobs_by_run(started), _jobs_by_run(failed))


def _read_parts(connection: Redis, looks: Sequence[RunLook]) -> None:
    """Have each look see its run's counts, its number of parts, and which shards with a job have a part."""
    shards_with_jobs = [list({*look.started, *look.failed}) for look in looks]
    with connection.pipeline(transaction=False) as pipe:
        for look, shards in zip(looks, shards_with_jobs, strict=True):
            parts_key = run_key(look.run, "parts")
            pipe.hmget(run_key(look.run), _COUNTS)
            pipe.hlen(parts_key)
            pipe.hmget(parts_key, ["total", *map(str, shards)])
        replies = iter(pipe.execute())

    for look, shards in zip(looks, shards_with_jobs, strict=True):
        counts = next(replies)
        num_fields = next(replies)
        total, *records = next(replies)
        with_part = {
            shard for shard, record in zip(shards, records, strict=True) if record is not None
        }
        num_parts = num_fields if total is None else num_fields - 1
        look.see_parts(_texts(_COUNTS, counts), num_parts, with_part)


def _jobs_by_run(entries: Iterable[bytes]) -> dict[str, dict[int, str]]:
    """Return the ids of shards' jobs in a registry, by run and shard. An entry is `<job>` or `<job>:<execution>`."""
    jobs: dict[str, dict[int, str]] = {}
    for entry in entries:
        job_id, _, _ = stored.text(entry).partition(":")
        named = run_and_shard(job_id)
        if named is None:
            continue  # a job of no run
        run, shard = named
        if shard is not None:
            jobs.setdefault(run, {})[shard] = job_id
    return jobs


def _queues_of(workers: Collection[Worker]) -> tuple[str, ...]:
    """Return the names of all queues on which workers listen, sorted."""
    names: set[str] = set()
    for worker in workers:
        names.update(worker.queues)
    return tuple(sorted(names))


def _is_loading(worker: Worker) -> bool:
    """Whether a worker still loads its model."""
    return worker.sample is not None and worker.sample.state == LOADING


def _alive(workers: Iterable[Worker]) -> set[str]:
    """Return the names of the workers that live."""
    return {worker.name for worker in workers if not worker.is_silent}


def _texts(names: Sequence[str], values: Sequence[bytes | None]) -> dict[str, str]:
    """Return values of Redis as texts, by their names. A missing value is left out."""
    return {
        name: stored.text(value)
        for name, value in zip(names, values, strict=True)
        if value is not None
    }


def _shown(facts: Mapping[str, str], name: str) -> str | None:
    """Return a fact's text, safe to show; None if it is missing."""
    if name not in facts:
        return None
    return safe_name(facts[name], MAX_TEXT_CHARS)


def _number(facts: Mapping[str, str], name: str) -> int:
    """Return a fact that is a count; 0 if it is missing or no number."""
    return stored.count(facts.get(name)) or 0
