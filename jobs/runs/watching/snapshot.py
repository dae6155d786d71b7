"""How a run stands at one moment, as a word and in sentences: what it lacks to go on, and what comes before it."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from redis import Redis

from jobs.common import stored
from jobs.common.display import safe_name
from jobs.common.keys import SILENT_S
from jobs.common.rq_jobs import JobStatus, QueueKeys
from jobs.common.workers import RESTORED_TEXT
from jobs.runs.plans.names import is_run_id, job_shard

WAITING = (JobStatus.QUEUED, JobStatus.STARTED, JobStatus.SCHEDULED, JobStatus.DEFERRED)
#: States of a planning job that has ended without a plan.
REFUSED = (JobStatus.FAILED, JobStatus.STOPPED, JobStatus.CANCELED)
#: The words of `RunSnapshot.state`.
STATES = ("planning", "not planned", "running", "ending", "finished", "failed", "cancelled", "stopped")
#: How much of a queue is looked through for the run's first job.
MAX_AHEAD = 1000


@dataclass(frozen=True)
class RunSnapshot:
    """A run's progress. Texts but the queue's name are as they may be shown. rows, shards, model: None until planned.

    gone: queued shards whose job is in Redis no more. claimed: those that a worker holds, which may write the run's
    end. rows_done, tokens: generated ones, of running shards too; other counts are of finished shards. queue_length:
    jobs of any run. is_held: no worker claims, because Redis came back with older data. awaited_model: the run's, if no
    worker there serves it; awaited_second: the second model, if no worker of second_queue does. planned_by: "newer" or
    "older" if only workers of such a version can take it. listened: queues that have workers. stopped: why it was
    cancelled though nobody asked for it. failed_jobs: without those that an earlier cancel has stopped. Times are Unix
    seconds. rows_per_s, tokens_per_s: for a finished run over worked_s, the time in which workers had shards.
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
    claimed: int = 0
    gone: int = 0
    left_s: float | None = None
    plan_error: str | None = None
    silent_workers: tuple[str, ...] = ()
    listened: tuple[str, ...] = ()
    awaited_second: str | None = None
    planned_by: str | None = None
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
    reuse_differs: str | None = None
    rows_escalated: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def to_object(self) -> dict[str, Any]:
        return {**asdict(self), "state": self.state, "shards_failed": self.shards_failed}

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
        # Shards that run while a planning waits count as the run's progress.
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
    """Say why a run is not as its submitter wishes: refused, stopped, or with too many errors."""
    told, error = [], snapshot.plan_error
    if error is not None and snapshot.finished:
        told.append(f"but      the last submit was refused: {error}; the run is finished as before")
    elif error is not None and not snapshot.cancelled:
        told.append(f"because  its planning failed: {error}")
    if snapshot.finished and not snapshot.is_planning:
        return told if snapshot.too_many_errors is None else [*told, f"but      {snapshot.too_many_errors}"]
    return told if snapshot.stopped is None else [*told, f"because  {snapshot.stopped}"]


def needs(snapshot: RunSnapshot) -> list[str]:
    """Say what a run lacks that nobody but a person brings: workers, and those that serve its models."""
    # A shard that was started waits too, once the worker that had it is gone.
    waits = snapshot.is_planning or snapshot.queued > 0 or snapshot.shards_started > 0
    if not waits or snapshot.cancelled or (snapshot.finished and not snapshot.is_planning):
        return []
    found, queue = [], snapshot.queue
    if snapshot.awaited_second is not None:
        model = snapshot.awaited_second
        found.append(_not_served(snapshot.second_queue, f"{model}, which is asked again"))
    if snapshot.planned_by is not None:
        found.append(
            f"it was planned by a {snapshot.planned_by} version of Tokenmill than that of the workers on queue "
            f"{queue!r}, which leave its jobs there: start one of that version"
        )
    elif not snapshot.workers:
        found.append(no_worker_text(queue, snapshot.listened))
    elif snapshot.awaited_model is not None:
        found.append(_not_served(queue, snapshot.awaited_model))
    return found


def obstacles(connection: Redis, snapshot: RunSnapshot) -> list[str]:
    """Say what holds a run up: what it needs, workers that are gone, jobs that are gone, or that come first."""
    if snapshot.cancelled or (snapshot.finished and not snapshot.is_planning):
        return []
    found = [
        f"worker {name!r}, which holds shards of it, has been silent for more than {SILENT_S} s: others take "
        "them over when its leases run out"
        for name in snapshot.silent_workers
    ]
    if snapshot.gone:
        found.append(
            f"the jobs of {snapshot.gone} of its shards are gone from queue {snapshot.queue!r}, which was "
            "emptied perhaps: submit it again, which enqueues them"
        )
    if snapshot.is_held:
        found.append(f"no worker claims anything: {RESTORED_TEXT}")
    found += needs(snapshot)
    is_next = (snapshot.is_planning or snapshot.queued) and snapshot.plan_status != JobStatus.STARTED
    if is_next and snapshot.workers and not snapshot.shards_started:
        found += _others_first(connection, snapshot)
    return found


def no_worker_text(queue: str, others: Sequence[str]) -> str:
    listening = f" (workers listen on {', '.join(map(repr, others))})" if others else ""
    return (
        f"no worker listens on queue {queue!r}{listening}: start one with "
        f"`rq worker --worker-class worker.BatchWorker -S json {safe_name(queue)}`"
    )


def _not_served(queue: str | None, model: str) -> str:
    return f"no worker on queue {queue!r} serves model {model}: start one there"


def _others_first(connection: Redis, snapshot: RunSnapshot) -> list[str]:
    keys = QueueKeys(snapshot.queue)
    with connection.pipeline(transaction=False) as pipe:
        pipe.lrange(keys.waiting, 0, MAX_AHEAD - 1)
        pipe.zrange(keys.started, 0, -1)
        waiting, started = pipe.execute()
    ids = [stored.text(each) for each in waiting]
    ours = (
        place
        for place, job_id in enumerate(ids)
        if job_id == snapshot.plan_job or job_shard(snapshot.run, job_id) is not None
    )
    ahead = ids[: next(ours, 0 if snapshot.second_queue else len(ids))]
    running = [stored.text(entry).partition(":")[0] for entry in started]
    if not ahead and not running:
        return []
    count = f"{len(ahead)}{' or more' if len(ahead) == MAX_AHEAD else ''}"
    names = (job_id.partition("-")[0] for job_id in (*running, *ahead))
    runs = list(dict.fromkeys(name for name in names if is_run_id(name)))
    of_runs = f", of run {', '.join(runs)} among others" if runs else ""
    return [f"it is behind {count} waiting and {len(running)} running jobs on queue {snapshot.queue!r}{of_runs}"]
