"""Says in words what a snapshot tells: how a run ended, what it lacks to go on, and what comes before it."""

from collections.abc import Sequence

from redis import Redis

from jobs.common import stored
from jobs.common.display import safe_name
from jobs.common.keys import SILENT_S
from jobs.common.rq_jobs import JobStatus, QueueKeys
from jobs.runs.plans.names import is_run_id, job_shard
from jobs.runs.watching.snapshot import RunSnapshot

#: How much of a queue is looked through for the run's first job.
MAX_AHEAD = 1000


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
    if not snapshot.workers:
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
