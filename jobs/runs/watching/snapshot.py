"""Describes a run at one moment: its state as a word, and what it needs and what it waits for as sentences."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from redis import Redis

from jobs.common import stored
from jobs.common.display import duration_text, safe_name
from jobs.common.keys import SILENT_S
from jobs.common.rq_jobs import JobStatus, QueueKeys
from jobs.common.workers import RESTORED_TEXT, SUSPENDED_TEXT
from jobs.runs.plans.names import is_run_id, job_shard

#: States of a planning job that waits or runs.
WAITING = (JobStatus.QUEUED, JobStatus.STARTED, JobStatus.SCHEDULED, JobStatus.DEFERRED)
#: States of a planning job that has ended without a plan.
REFUSED = (JobStatus.FAILED, JobStatus.STOPPED, JobStatus.CANCELED)
#: The words of `RunSnapshot.state`.
STATES = (
    "planning",
    "not planned",
    "running",
    "ending",
    "finished",
    "expired",
    "failed",
    "cancelled",
    "stopped",
)
#: The words for a run on which nobody works any more.
ENDED_STATES = ("finished", "expired", "failed", "cancelled", "stopped")
#: A run counts as stalled if none of its shards has reported progress for this long.
STALLED_S = 30.0
#: The most waiting jobs of a queue that are looked at.
MAX_OTHERS = 1000


@dataclass(frozen=True)
class RunSnapshot:
    """A run's progress. Texts are safe to show, except the queue's name. Times are Unix seconds.

    rows, shards, model: None until the run is planned.
    rows_done, tokens: counted over finished and running shards. All other counts are of finished shards.
    gone: shards without a part whose job is no longer in Redis.
    claimed: shards whose job a worker has claimed. One of these jobs may be about to end the run.
    queue_length: the number of jobs that wait on the run's queues, also of other runs.
    is_held: whether workers claim nothing because Redis came back with older data.
    is_suspended: whether `rq suspend` keeps all workers from taking jobs.
    awaited_model, awaited_second: the run's first and second model. Each is None if a worker of its queue serves it.
    awaited_adapters: the run's adapters whose files no worker of its queue has, as one text.
    awaited_version: "newer" or "older" if no worker of the run's queue can read the plan, because a newer or older
    version of Tokenmill planned the run; else None.
    listened: the queues that have workers.
    stopped: why the run was stopped, if its errors stopped it.
    submitted_by: the user and machine that submitted the run last, as the client named them, so they may be wrong; None
    if a worker enqueued the run.
    deadline: the time after which no row is begun. expired: the number of rows that were not begun before the deadline.
    failed_jobs: the ids of failed jobs, without jobs that an earlier cancel has stopped.
    worked_s: the seconds in which workers had shards; None until the run has finished.
    left_s: the estimated seconds until the run ends; None if they are not known.
    quiet_s: the seconds since a shard last reported progress; None while nobody works on the run.
    rows_per_s, tokens_per_s: counted over `worked_s` in a finished run, else over the time since work began.
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
    is_held: bool
    awaited_model: str | None
    stopped: str | None
    too_many_errors: str | None
    is_suspended: bool = False
    claimed: int = 0
    gone: int = 0
    left_s: float | None = None
    quiet_s: float | None = None
    plan_error: str | None = None
    silent_workers: tuple[str, ...] = ()
    listened: tuple[str, ...] = ()
    awaited_adapters: str | None = None
    awaited_second: str | None = None
    awaited_version: str | None = None
    second_queue: str | None = None
    model: str | None = None
    submitted_at: float | None = None
    submitted_by: str | None = None
    began_at: float | None = None
    ended_at: float | None = None
    worked_s: float | None = None
    rows_per_s: float | None = None
    tokens_per_s: float | None = None
    errors: int = 0
    failed_checks: int = 0
    cut: int = 0
    rows_reused: int = 0
    reuse_differs: str | None = None
    rows_escalated: int = 0
    deadline: float | None = None
    expired: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def to_object(self) -> dict[str, Any]:
        """Return the snapshot as JSON."""
        return {
            **asdict(self),
            "state": self.state,
            "shards_failed": self.shards_failed,
            "deadline_holds": self.deadline_holds,
        }

    @property
    def is_active(self) -> bool:
        """Whether the run is being planned, computed or ended."""
        return self.state in ("planning", "running", "ending")

    @property
    def shards_failed(self) -> int:
        """Return the number of failed shards; 0 for a cancelled run."""
        return 0 if self.cancelled else len(self.failed_jobs)

    @property
    def shards_left(self) -> int:
        """Return the number of shards that nobody computes until the run is submitted again."""
        if self.state not in ("cancelled", "stopped"):
            return 0
        return max(0, (self.shards or 0) - self.shards_done - self.shards_started)

    @property
    def queued(self) -> int:
        """Return the number of shards that wait for a worker."""
        num_taken = self.shards_done + self.shards_started + len(self.failed_jobs) + self.gone
        return max(0, (self.shards or 0) - num_taken)

    @property
    def plan_failed(self) -> bool:
        """Whether the last submission's planning job has failed, or was lost before it made a plan."""
        if self.plan_status is not None:
            return self.plan_status in REFUSED
        return self.plan_error is not None or self.shards is None

    @property
    def all_failed(self) -> bool:
        """Whether the run has finished with an error in every row, and its limit does not allow so many errors."""
        has_only_errors = self.errors > 0 and self.errors == self.rows
        return self.finished and self.too_many_errors is not None and has_only_errors

    @property
    def deadline_holds(self) -> bool | None:
        """Whether the run is expected to end before its deadline.

        None if the run has no deadline, or has finished, or if there is no estimate of the time left yet.
        """
        if self.deadline is None or self.finished:
            return None
        until_deadline_s = self.deadline - time.time()
        if until_deadline_s <= 0:
            return False
        if self.left_s is None:
            return None
        return self.left_s <= until_deadline_s

    @property
    def is_stalled(self) -> bool:
        """Whether shards run, and none of them has reported progress for STALLED_S."""
        return self.state == "running" and self.quiet_s is not None and self.quiet_s >= STALLED_S

    @property
    def is_planning(self) -> bool:
        """Whether a planning job waits or runs."""
        return self.plan_status in WAITING

    @property
    def is_idle(self) -> bool:
        """Whether no job of the run waits or runs."""
        if self.is_planning or self.shards_started or self.claimed:
            return False
        if self.shards is None:
            # A planning job that has ended still has a status. Without a status, somebody has deleted the job.
            return self.plan_status is None
        if not self.queue_length:
            return True
        # If every shard has a part, the job that must end the run may still wait.
        may_wait = self.queued > 0 or self.shards_done >= self.shards
        return not may_wait

    @property
    def is_over(self) -> bool:
        """Whether the run is cancelled or finished. A finished run that is planned again is not over."""
        has_finished = self.finished and not self.is_planning
        return self.cancelled or has_finished

    @property
    def state(self) -> str:
        """Return the run's state, one of STATES."""
        if self.finished and not self.is_planning:
            if self.all_failed:
                return "failed"
            return "expired" if self.expired else "finished"
        if self.cancelled:
            return "cancelled" if self.stopped is None else "stopped"
        # If shards run while a planning job waits, the run counts as running.
        if self.is_planning and (self.plan_status is JobStatus.STARTED or not self.shards_started):
            return "planning"
        if self.plan_failed and (self.shards is None or self.is_idle):
            return "failed"
        if self.shards is None:
            return "not planned"
        if self.shards_started or self.queued:
            return "running"
        return "failed" if self.failed_jobs or self.gone else "ending"


def verdict(snapshot: RunSnapshot) -> list[str]:
    """Return lines that say what went wrong with a run, such as why it was stopped; none if nothing is wrong."""
    lines = []
    error = snapshot.plan_error
    if error is not None and snapshot.finished:
        lines.append(
            f"but      the last submit was refused: {error}; the run is finished as before"
        )
    elif error is not None and not snapshot.cancelled:
        lines.append(f"because  its planning failed: {error}")

    if snapshot.finished and not snapshot.is_planning:
        if snapshot.expired:
            lines.append(f"but      {expired_text(snapshot)}")
        if snapshot.too_many_errors is not None:
            lines.append(f"but      {snapshot.too_many_errors}")
    elif snapshot.stopped is not None:
        lines.append(f"because  {snapshot.stopped}")
    return lines


def left_text(snapshot: RunSnapshot) -> str:
    """Say how much time a run has left; "" if it does not run, or if nobody works on it."""
    if snapshot.is_stalled:
        return f"stalled for {duration_text(snapshot.quiet_s or 0.0)}"
    if snapshot.left_s is not None:
        return duration_text(snapshot.left_s)
    is_worked_on = snapshot.state == "running" and snapshot.quiet_s is not None
    return "estimating" if is_worked_on else ""


def expired_text(snapshot: RunSnapshot) -> str:
    """Say how many rows were not begun before a run's deadline, and what to do."""
    is_one = snapshot.expired == 1
    rows_were = "row was" if is_one else "rows were"
    them = "it" if is_one else "them"
    return (
        f"{snapshot.expired} {rows_were} not begun before the deadline: "
        f"`tokenmill errors {snapshot.run} --retry NEW` asks {them}"
    )


def needs(snapshot: RunSnapshot) -> list[str]:
    """Return sentences about what a person must provide before a run can go on, such as a worker for its model."""
    # A started shard counts as waiting too, because its worker may be gone.
    is_waiting = snapshot.is_planning or snapshot.queued > 0 or snapshot.shards_started > 0
    if not is_waiting or snapshot.is_over:
        return []

    sentences = []
    queue = snapshot.queue
    if snapshot.is_held:
        sentences.append(f"no worker claims anything: {RESTORED_TEXT}")
    if snapshot.is_suspended:
        sentences.append(SUSPENDED_TEXT)
    if snapshot.awaited_second is not None:
        second = _not_served(snapshot.second_queue, snapshot.awaited_second)
        sentences.append(f"rows with a low margin wait for the second model: {second}")
    if snapshot.awaited_version is not None:
        sentences.append(
            f"it was planned by a {snapshot.awaited_version} version of Tokenmill, and no worker on queue {queue!r} "
            f"can read its plan: start a worker of the {snapshot.awaited_version} version"
        )
    elif not snapshot.workers:
        sentences.append(no_worker_text(queue, snapshot.listened))
    elif snapshot.awaited_model is not None:
        sentences.append(_not_served(queue, snapshot.awaited_model))
    elif snapshot.awaited_adapters is not None:
        sentences.append(
            f"no worker on queue {queue!r} has the files of adapters {snapshot.awaited_adapters}: put these files into "
            "the folder of its TOKENMILL_ADAPTERS, and the run goes on"
        )
    return sentences


def obstacles(connection: Redis, snapshot: RunSnapshot) -> list[str]:
    """Return sentences about what holds a run up: what it needs, its silent workers, its lost jobs, and other jobs."""
    if snapshot.is_over:
        return []

    sentences = []
    for name in snapshot.silent_workers:
        sentences.append(
            f"worker {name!r}, which holds some of the run's shards, has been silent for more than {SILENT_S} s: other "
            "workers take over these shards when the leases of this worker run out"
        )
    if snapshot.gone:
        sentences.append(
            f"the jobs of {snapshot.gone} of the run's shards are gone from queue {snapshot.queue!r}, which was "
            "perhaps emptied: submit the run again, which enqueues these jobs"
        )
    sentences += needs(snapshot)
    has_waiting = snapshot.is_planning or snapshot.queued > 0
    runs_nothing = snapshot.plan_status != JobStatus.STARTED and not snapshot.shards_started
    if has_waiting and runs_nothing and snapshot.workers:
        sentences += _other_jobs(connection, snapshot)
    return sentences


def no_worker_text(queue: str, listened: Sequence[str]) -> str:
    """Say that a queue has no worker, and how to start one. listened: the queues that have workers."""
    listening = f" (workers listen on {', '.join(map(repr, listened))})" if listened else ""
    return (
        f"no worker listens on queue {queue!r}{listening}: start one with "
        f"`rq worker --worker-class worker.BatchWorker -S json {safe_name(queue)}`"
    )


def _not_served(queue: str | None, model: str) -> str:
    """Say that a queue lacks a worker for a model."""
    return f"no worker on queue {queue!r} serves model {model}: start one there"


def _other_jobs(connection: Redis, snapshot: RunSnapshot) -> list[str]:
    """Return a sentence about the other jobs that wait or run on the run's queue; none if there are no such jobs.

    The sentence does not say how many of these jobs run before this run's jobs, because workers keep reordering the
    queue so that each run gets its share.
    """
    keys = QueueKeys(snapshot.queue)
    with connection.pipeline(transaction=False) as pipe:
        pipe.lrange(keys.waiting, 0, MAX_OTHERS - 1)
        pipe.zrange(keys.started, 0, -1)
        waiting, started = pipe.execute()
    waiting_ids = []
    for job_id in map(stored.text, waiting):
        if not _is_own(snapshot, job_id):
            waiting_ids.append(job_id)
    running_ids = []  # all are ids of other jobs, because `obstacles` calls this only if the run has no running job
    for entry in started:
        job_id, _, _ = stored.text(entry).partition(":")
        running_ids.append(job_id)
    if not waiting_ids and not running_ids:
        return []

    count = str(len(waiting_ids))
    may_have_more = len(waiting) == MAX_OTHERS  # no more than MAX_OTHERS jobs were read
    if may_have_more:
        count += " or more"
    sentence = (
        f"other jobs on queue {snapshot.queue!r}: {count} waiting, {len(running_ids)} running"
    )
    other_runs = _runs_of([*running_ids, *waiting_ids])
    if other_runs:
        sentence += f", some of run {', '.join(other_runs)}"
    return [
        f"{sentence}; each run gets its share of the workers, so this run need not wait for all these jobs"
    ]


def _runs_of(job_ids: Sequence[str]) -> list[str]:
    """Return the runs to which jobs belong, each once, in the order of the jobs."""
    runs: dict[str, None] = {}  # a set that keeps the order
    for job_id in job_ids:
        run, _, _ = job_id.partition("-")
        if is_run_id(run):
            runs[run] = None
    return list(runs)


def _is_own(snapshot: RunSnapshot, job_id: str) -> bool:
    """Whether a job computes a shard of the run, or plans the run."""
    return job_id == snapshot.plan_job or job_shard(snapshot.run, job_id) is not None
