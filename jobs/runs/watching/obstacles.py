"""What holds a run up: no worker listens, other jobs come first, or the worker that had it is gone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from jobs.common import stored
from jobs.common.display import safe_name
from jobs.common.keys import RQ, SILENT_S, WORKER_STATS_TTL_S, worker_key
from jobs.common.rq_jobs import WORKERS_KEY, JobStatus, job_key, queue_keys
from jobs.runs.plans.names import is_run_id, job_shard
from jobs.runs.watching.snapshot import RunSnapshot

if TYPE_CHECKING:
    from redis import Redis

#: How much of a queue is looked through for the run's first job.
MAX_AHEAD = 1000


def obstacles(connection: Redis, snapshot: RunSnapshot) -> list[str]:
    """Return a sentence for each thing that keeps a run from going on; none for one that has ended."""
    if snapshot.finished or snapshot.cancelled:
        return []
    # A shard that was started waits too, once the worker that had it is gone.
    waits = snapshot.is_planning or snapshot.queued > 0 or snapshot.started > 0
    found = _silent_workers(connection, snapshot) if snapshot.started else []
    if snapshot.gone:
        found.append(
            f"the jobs of {snapshot.gone} of its shards are gone from queue {snapshot.queue!r}, which was "
            "emptied perhaps: submit it again, which enqueues them"
        )
    if waits and not snapshot.workers:
        found.append(no_worker_text(snapshot.queue, listened_queues(connection)))
    elif waits and not snapshot.started and snapshot.plan_status != JobStatus.STARTED:
        found += _others_first(connection, snapshot)
    return found


def no_worker_text(queue: str, others: Sequence[str]) -> str:
    """Say that no worker listens on a queue. others: queues on which workers do."""
    listening = f" (workers listen on {', '.join(map(repr, others))})" if others else ""
    return (
        f"no worker listens on queue {queue!r}{listening}: start one with "
        f"`rq worker --worker-class worker.BatchWorker -S json {safe_name(queue)}`"
    )


def listened_queues(connection: Redis) -> list[str]:
    """Return the names of the queues on which a living worker listens, sorted."""
    keys: Any = connection.smembers(WORKERS_KEY)
    with connection.pipeline(transaction=False) as pipe:
        for key in keys:
            pipe.hget(key, "queues")  # gone with the key of a worker that was killed
        replies = pipe.execute(raise_on_error=False)
    names = [stored.text(each).split(",") for each in replies if isinstance(each, bytes)]
    return sorted({name for each in names for name in each})


def _others_first(connection: Redis, snapshot: RunSnapshot) -> list[str]:
    keys = queue_keys(snapshot.queue)
    with connection.pipeline(transaction=False) as pipe:
        pipe.lrange(keys.waiting, 0, MAX_AHEAD - 1)
        pipe.zrange(keys.started, 0, -1)
        waiting, started = pipe.execute()
    ids = [stored.text(each) for each in waiting]
    ours = (place for place, job_id in enumerate(ids) if _is_of(snapshot, job_id))
    ahead = ids[: next(ours, len(ids))]
    running = [stored.text(entry).partition(":")[0] for entry in started]
    if not ahead and not running:
        return []
    count = f"{len(ahead)}{' or more' if len(ahead) == MAX_AHEAD else ''}"
    runs = _runs([*running, *ahead])
    of_runs = f", of run {', '.join(runs)} among others" if runs else ""
    return [
        f"it is behind {count} waiting and {len(running)} running jobs on queue {snapshot.queue!r}{of_runs}"
    ]


def _is_of(snapshot: RunSnapshot, job_id: str) -> bool:
    return job_id == snapshot.plan_job or job_shard(snapshot.run, job_id) is not None


def _runs(job_ids: Iterable[str]) -> list[str]:
    """Return the runs to which jobs belong, in order."""
    names = (job_id.rpartition("-")[0] for job_id in job_ids)
    return list(dict.fromkeys(name for name in names if is_run_id(name)))


def _silent_workers(connection: Redis, snapshot: RunSnapshot) -> list[str]:
    """Name the workers that hold shards of the run and no longer tell of themselves."""
    leases = _leases(connection, snapshot)
    with connection.pipeline(transaction=False) as pipe:
        for worker in leases:
            pipe.ttl(worker_key(worker))
        stats_ttls_s = pipe.execute()
    found = []
    for (worker, left_s), stats_ttl_s in zip(leases.items(), stats_ttls_s, strict=True):
        silent_s = WORKER_STATS_TTL_S - stats_ttl_s
        # One without statistics is none of ours: a stock worker tells of itself elsewhere.
        if stats_ttl_s >= 0 and silent_s > SILENT_S:
            found.append(
                f"worker {worker!r}, silent for {silent_s} s, holds {len(left_s)} of its shards: "
                f"others take them over in about {max(left_s)} s"
            )
    return found


def _leases(connection: Redis, snapshot: RunSnapshot) -> dict[str, list[int]]:
    """Return for each worker the seconds left of its lease of each shard of the run that it holds."""
    started: Any = connection.zrange(queue_keys(snapshot.queue).started, 0, -1)
    entries = [stored.text(entry) for entry in started]
    with connection.pipeline(transaction=False) as pipe:
        for entry in entries:
            if job_shard(snapshot.run, entry.partition(":")[0]) is not None:
                pipe.hget(f"{RQ}:execution:{entry}", "worker_name")
                pipe.ttl(f"{RQ}:execution:{entry}")
                pipe.hget(job_key(entry.partition(":")[0]), "worker_name")
        replies = pipe.execute()
    leases: dict[str, list[int]] = {}
    for holder, left_s, named in zip(replies[::3], replies[1::3], replies[2::3], strict=True):
        leases.setdefault(stored.text(holder or named or b""), []).append(max(0, left_s))
    return leases
