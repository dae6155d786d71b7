"""Collects what Redis holds about one run, and makes a snapshot of it."""

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

from redis import Redis

from jobs.common import rq_jobs, stored
from jobs.common.display import MAX_TEXT_CHARS, safe_name
from jobs.common.keys import SUBMISSION_FIELD, run_key
from jobs.common.rq_jobs import JobStatus
from jobs.common.workers import (
    LOADING,
    Worker,
    are_paused,
    are_suspended,
    listening_on,
    models_on,
    other_length_text,
)
from jobs.context.adapters import shown_adapter
from jobs.runs.plans.names import shard_job_id
from jobs.runs.redis_state.shard_jobs import count_held
from jobs.runs.redis_state.state import PLAN_ERROR, REUSE_DIFFERS, SUBMITTED_BY, RunState
from jobs.runs.redis_state.submission import DEADLINE, ErrorLimit
from jobs.runs.statistics.run_statistics import COUNTED
from jobs.runs.watching.failures import failure_text
from jobs.runs.watching.snapshot import WAITING, RunSnapshot
from jobs.runs.watching.time_left import PartsDone, Progress, time_left

#: The most shards whose jobs are looked up one by one, if no shard seems to run.
MAX_SOUGHT = 1000
#: The most finished shards from which the time left is estimated.
MAX_LATEST_PARTS = 200
#: A worker still counts as working on a run if the run's last shard ended less than this long ago.
BETWEEN_SHARDS_S = 10.0


class QueueJobs(NamedTuple):
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


@dataclass(frozen=True)
class _Rates:
    """The rows and tokens that a run computes in a second; None if the rates are not known."""

    rows_per_s: float | None = None
    tokens_per_s: float | None = None


class RunReader:
    """Collects the state of one run. Call `add_queues`, then `add_parts`, then the other methods.

    facts: fields of the run's hash, as texts. plan_status: the status of the planning job; None if there is no job.
    length: the number of waiting jobs of all runs on the run's queues.
    started, failed: the ids of jobs that run or have failed, by shard.
    running: the same as `started`, without the shards that have a part.
    done: the number of shards that have a part. claimed: the number of the run's jobs that workers have claimed.
    gone: the number of shards that have neither a part nor a job in Redis.
    progress: the progress of each shard in `running`, in the same order.
    is_worked_on: whether a worker of the run's queues is alive, and a shard of the run runs or has just ended.
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

    def add_queues(self, queues: Mapping[str, QueueJobs]) -> None:
        """Note how many jobs wait on the run's queues, and which of the run's jobs run or have failed.

        queues: the jobs of each of the run's queues, by the queue's name.
        """
        self.length = 0
        self.started: dict[int, str] = {}
        self.failed: dict[int, str] = {}
        for name in self.queues:
            queue = queues[name]
            self.length += queue.length
            self.started.update(queue.started.get(self.run, {}))
            self.failed.update(queue.failed.get(self.run, {}))

    def add_parts(
        self, counts: Mapping[str, str], num_parts: int, shards_with_part: Collection[int]
    ) -> None:
        """Note the run's counts and its number of parts, and forget jobs that the parts have made superfluous.

        shards_with_part: the shards that have a part and also a running or failed job. Another execution has written
        the part.
        """
        self.facts |= counts
        self.counts = {name: _number(counts, f"total_{name}") for name in COUNTED}
        self.done = num_parts
        self.running: dict[int, str] = {}
        for shard, job_id in self.started.items():
            if shard not in shards_with_part:
                self.running[shard] = job_id

        # A failed job does not count if its shard runs again or has a part. There is one exception: if every shard has
        # a part, and the run has not finished and no job runs, the job has failed while it ended the run.
        has_all_parts = num_parts >= (self.shards or 1)
        failed_at_end = has_all_parts and not self.is_finished and not self.started
        superseded_shards = set(self.running)
        if not failed_at_end:
            superseded_shards.update(shards_with_part)
        still_failed = sorted(self.failed.keys() - superseded_shards)
        self.failed = {shard: self.failed[shard] for shard in still_failed}

    def find_stopped(self, connection: Redis) -> None:
        """Find the failed jobs that an earlier cancel has stopped. Sets `stopped`.

        A run's submissions are numbered. A cancel stops the jobs of the last submission and of all earlier ones.
        """
        last_cancelled = _number(self.facts, "cancelled_submission")
        if not last_cancelled:
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
            if submission <= last_cancelled:
                self.stopped.add(job_id)

    @property
    def seems_idle(self) -> bool:
        """Whether the run is planned and not over, and no shard seems to run."""
        if self.is_finished or "cancelled" in self.facts:
            return False
        is_planned = bool(self.shards) and self.plan_status not in WAITING
        return is_planned and not self.running

    @property
    def has_just_ended_a_shard(self) -> bool:
        """Whether a shard ended so recently that its worker may be about to begin another shard."""
        ended_at = stored.seconds(self.facts.get("ended_at"))
        return ended_at is not None and time.time() - ended_at < BETWEEN_SHARDS_S

    @property
    def quiet_s(self) -> float | None:
        """Return the seconds since a shard last began, reported progress or ended; None if nobody works on the run."""
        if not self.is_worked_on:
            return None
        moments = [stored.seconds(self.facts.get("ended_at"))]
        for progress in self.progress:
            moments += [progress.started_at, progress.reported_at]
        known_moments = [moment for moment in moments if moment is not None]
        if not known_moments:
            return None
        return max(0.0, time.time() - max(known_moments))

    @property
    def lacks_workers(self) -> bool:
        """Whether shards wait, nobody works on a shard, and no shard has failed."""
        if self.is_finished or "cancelled" in self.facts or self.failed:
            return False
        has_shards_left = self.done < (self.shards or 0)
        return has_shards_left and not self.is_worked_on

    @property
    def may_lack_jobs(self) -> bool:
        """Whether fewer jobs wait on the run's queues than the run has shards left."""
        if self.shards is None:
            return False
        num_left = self.shards - self.done - len(self.failed)
        return num_left > self.length

    def find_jobs(self, connection: Redis) -> None:
        """Look up the jobs of unfinished shards one by one. Sets `claimed` and `gone`."""
        shards_with_part = RunState(connection, self.run).recorded_shards()
        all_shards = range(self.shards or 0)
        unfinished_shards = [shard for shard in all_shards if shard not in shards_with_part]
        # Claimed jobs are counted only if no job waits. While jobs wait, the run goes on in any case.
        if not self.length:
            # Without unfinished shards, any shard's job may be the one that ends the run.
            shards = unfinished_shards or all_shards
            job_ids = chain.from_iterable(map(self._job_ids, shards))
            self.claimed = count_held(connection, job_ids)

        sought_shards = [shard for shard in unfinished_shards if shard not in self.failed]
        with connection.pipeline(transaction=False) as pipe:
            for shard in sought_shards[:MAX_SOUGHT]:
                job_keys = map(rq_jobs.job_key, self._job_ids(shard))
                pipe.exists(*job_keys)
            job_counts = pipe.execute()  # for each shard, how many of its jobs Redis has
        num_without_job = job_counts.count(0)
        # Nobody runs a stopped job again, so its shard counts as gone too.
        self.gone = num_without_job + len(self.stopped)

    def _job_ids(self, shard: int) -> list[str]:
        """Return the ids of a shard's jobs: one, or two in a cascade."""
        job_ids = [shard_job_id(self.run, shard)]
        if "second_queue" in self.facts:
            job_ids.append(shard_job_id(self.run, shard, is_second=True))
        return job_ids

    def snapshot(self, connection: Redis, workers: Collection[Worker]) -> RunSnapshot:
        """Return the run's progress. Call it after `add_queues`, `add_parts` and `find_stopped`.

        workers: the workers of all queues.
        """
        facts = self.facts
        counts = self.counts
        progress = self.progress
        submission = _number(facts, "submission")
        # A submission's number is the time of the submission in milliseconds.
        submitted_at = submission / 1000 if submission else None

        rows = stored.count(facts.get("rows"))
        rows_under_way = sum(shard.rows for shard in progress)
        tokens_under_way = sum(shard.tokens for shard in progress)
        rows_done = counts["rows"] + rows_under_way
        if rows is not None:
            rows_done = min(rows_done, rows)

        began_at = stored.seconds(facts.get("began_at"))
        ended_at = stored.seconds(facts.get("ended_at"))
        worked_s = stored.seconds(facts.get("worked_s")) if self.is_finished else None
        rates = self._rates(began_at, ended_at, worked_s)

        failed_jobs = [job_id for job_id in self.failed.values() if job_id not in self.stopped]
        living_workers = [worker for worker in workers if not worker.is_silent]
        listening_workers = listening_on(living_workers, facts["queue"])
        busy_workers = {shard.worker for shard in progress}
        silent_workers = sorted(busy_workers - _alive(workers))
        # If the second model has no queue of its own, this is the run's only queue.
        queue_of_second = self.queues[-1]
        awaited_second = self._awaited_model(
            workers, queue_of_second, identity_fact="second_model", text_fact="second_text"
        )
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
            failed_jobs=tuple(failed_jobs),
            workers=len(listening_workers),
            queue_length=self.length,
            listened=_queues_of(living_workers),
            silent_workers=tuple(silent_workers),
            is_held=are_paused(listening_workers),
            is_suspended=are_suspended(workers),
            awaited_model=self._awaited_first_model(workers),
            awaited_adapters=self._awaited_adapters(workers),
            awaited_second=awaited_second,
            awaited_version=self._awaited_version(workers),
            stopped=_safe_fact(facts, "stopped"),
            reuse_differs=_safe_fact(facts, REUSE_DIFFERS),
            too_many_errors=self._too_many_errors(),
            deadline=stored.seconds(facts.get(DEADLINE)),
            model=_safe_fact(facts, "model_text"),
            submitted_at=submitted_at,
            submitted_by=_safe_fact(facts, SUBMITTED_BY),
            began_at=began_at,
            ended_at=ended_at,
            worked_s=worked_s,
            quiet_s=self.quiet_s,
            rows_per_s=rates.rows_per_s,
            tokens_per_s=rates.tokens_per_s,
            errors=counts["errors"],
            failed_checks=counts["failed_checks"],
            cut=counts["cut"],
            rows_reused=counts["rows_reused"],
            rows_escalated=counts["rows_escalated"],
            expired=counts["expired"],
            prompt_tokens=counts["prompt_tokens"],
            completion_tokens=counts["completion_tokens"],
            cached_tokens=counts["cached_tokens"],
        )

    def _too_many_errors(self) -> str | None:
        """Say that too many rows have an error; return None if the run's limit allows the errors."""
        limit = ErrorLimit.from_stored(self.facts.get("max_errors"))
        # An expired row has an error too, but the model was never asked. So the limit does not count it.
        num_expired = self.counts["expired"]
        judged_rows = self.counts["rows"] - num_expired
        judged_errors = self.counts["errors"] - num_expired
        return limit.excess(judged_rows, judged_errors, has_ended=self.is_finished)

    def _rates(
        self, began_at: float | None, ended_at: float | None, worked_s: float | None
    ) -> _Rates:
        """Return how fast the run is computed. Rows and tokens of running shards count too.

        Arguments: see `_measured`.
        """
        measured = self._measured(began_at, ended_at, worked_s)
        if measured is None:
            return _Rates()
        num_rows = measured.rows + sum(shard.rows for shard in self.progress)
        num_tokens = measured.tokens + sum(shard.tokens for shard in self.progress)
        return _Rates(num_rows / measured.seconds, num_tokens / measured.seconds)

    def _measured(
        self, began_at: float | None, ended_at: float | None, worked_s: float | None
    ) -> _Measured | None:
        """Return the rows, tokens and seconds from which the rates are computed; None if the rates are not known.

        A run that lacks workers has no rates, because its old rates would mislead.
        began_at: when work on the submission began. ended_at: when its last part ended. worked_s: see RunSnapshot; None
        until the run has finished.
        """
        facts = self.facts
        if worked_s:  # the run has finished
            num_rows = self.counts["rows"] - self.counts["rows_reused"]
            return _Measured(num_rows, self.counts["generated_tokens"], worked_s)
        measured_until = ended_at
        if self.is_worked_on and not self.is_finished:
            measured_until = time.time() - (self.quiet_s or 0.0)  # the time of the last report
        if self.lacks_workers or began_at is None or measured_until is None:
            return None
        if measured_until <= began_at:
            return None
        # The judged numbers count the parts that were recorded since the last submission.
        return _Measured(
            _number(facts, "judged_rows"),
            _number(facts, "judged_tokens"),
            measured_until - began_at,
        )

    def left_s(self, connection: Redis, workers: Collection[Worker]) -> float | None:
        """Estimate the seconds left, from the running shards and the latest parts.

        Returns None if there is no estimate, for example because the run lacks workers.
        """
        if self.lacks_workers:
            return None
        # A worker that still loads its model computes no shards. But it may have the name of a killed worker. Shards of
        # the killed worker are still recorded under this name.
        computing_workers = _alive(worker for worker in workers if not _is_loading(worker))
        running: dict[int, Progress] = {}
        for shard, progress in zip(self.running, self.progress, strict=True):
            if progress.worker in computing_workers:
                running[shard] = progress

        state = RunState(connection, self.run)
        shards_with_part = state.recorded_shards()
        latest_shards = self._oldest_first(shards_with_part)[-MAX_LATEST_PARTS:]
        parts = PartsDone(shards_with_part, state.parts_of(latest_shards), self.counts)

        # The field `sizes` holds each shard's share of the run's work.
        shares: Any = connection.hget(run_key(self.run), "sizes")
        rows = stored.count(self.facts.get("rows"))
        return time_left(shares, self.shards, rows, parts, running, time.time())

    def _oldest_first(self, shards_with_part: Collection[int]) -> list[int]:
        """Return the shards that have a part, in the order in which the parts were probably done.

        Shards are started in the order of their numbers. So the latest parts are those just before the running shards.
        Parts after the running shards come from an earlier submission, and count as the oldest.
        """
        last_running_shard = max(self.running, default=-1)
        shards_of_earlier_submission = []
        shards_of_last_submission = []
        for shard in sorted(shards_with_part):
            if shard > last_running_shard:
                shards_of_earlier_submission.append(shard)
            else:
                shards_of_last_submission.append(shard)
        return shards_of_earlier_submission + shards_of_last_submission

    def _plan_error(self, connection: Redis) -> str | None:
        """Say why the last planning job made no plan; None if it made a plan, or may still make one."""
        facts = self.facts
        status = self.plan_status
        if status in (JobStatus.STOPPED, JobStatus.CANCELED):
            return "it was stopped"
        if status is JobStatus.FAILED:
            return failure_text(connection, facts["plan_job"])
        if status is None and PLAN_ERROR in facts:
            return _safe_fact(facts, PLAN_ERROR)
        if status is None and self.shards is None and "cancelled" not in facts:
            return f"its job is gone from queue {facts['queue']!r}, which perhaps was emptied: submit it again"
        return None

    def _awaited_first_model(self, workers: Collection[Worker]) -> str | None:
        """Return a text that names the model that the run needs now; None if a worker serves it (see `_awaited_model`).

        A waiting planning job needs the model with which it was submitted. After that, the run needs its first model.
        """
        queue = self.facts["queue"]
        if self.plan_status in WAITING:
            return self._awaited_model(
                workers, queue, identity_fact="plan_model", text_fact="plan_model"
            )
        return self._awaited_model(workers, queue, identity_fact="model", text_fact="model_text")

    def _awaited_model(
        self, workers: Collection[Worker], queue: str, identity_fact: str, text_fact: str
    ) -> str | None:
        """Return a text that names a model that the run needs; None if a worker of the queue serves the model.

        Also returns None if no model is named, or if a worker does not say what it serves.
        identity_fact, text_fact: the fields of the run's hash that hold the model's identity and its name for people.
        """
        models = models_on(workers, queue)
        identity = self.facts.get(identity_fact)
        if models is None or identity is None:
            return None
        model, _, _ = identity.partition("\n")  # further lines name adapters
        if model in models:
            return None
        text = _safe_fact(self.facts, text_fact)
        other_length = other_length_text(workers, queue, identity)
        if text and other_length:
            return f"{text}, but {other_length}"
        return text

    def _awaited_adapters(self, workers: Collection[Worker]) -> str | None:
        """Return the run's adapters whose files no worker of its queue has, as one text.

        Returns None if every adapter is on a worker, or if a worker does not say what it serves.
        """
        served_names = models_on(workers, self.facts["queue"])  # of models and adapters
        if served_names is None:
            return None
        _, *adapters = self.facts.get("model", "").split("\n")  # the first line names the model
        missing_names = []
        for adapter in adapters:
            if adapter not in served_names:
                missing_names.append(shown_adapter(adapter))
        if not missing_names:
            return None
        return safe_name(", ".join(missing_names), MAX_TEXT_CHARS)

    def _awaited_version(self, workers: Collection[Worker]) -> str | None:
        """Return whether the plan's format is "newer" or "older" than the formats that the queue's workers can read.

        Returns None if a worker can read the plan, or if the formats are not known.
        """
        readable_formats = set()
        for worker in listening_on(workers, self.facts["queue"]):
            sample = worker.sample
            if sample is not None and not worker.is_silent and sample.format:
                readable_formats.add(sample.format)

        plan_format = stored.count(self.facts.get("format"))
        if not readable_formats or plan_format is None or plan_format in readable_formats:
            return None
        return "newer" if plan_format > max(readable_formats) else "older"


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
    """Return the names of the workers that are alive."""
    return {worker.name for worker in workers if not worker.is_silent}


def _safe_fact(facts: Mapping[str, str], name: str) -> str | None:
    """Return a fact's text, safe to show; None if it is missing."""
    if name not in facts:
        return None
    return safe_name(facts[name], MAX_TEXT_CHARS)


def _number(facts: Mapping[str, str], name: str) -> int:
    """Return a fact that is a count; 0 if it is missing or no number."""
    return stored.count(facts.get(name)) or 0
