"""What holds a run up: no worker listens, other jobs come first, or the worker that had it is gone."""

from collections.abc import Sequence

from redis import Redis

from jobs.common import stored
from jobs.common.display import safe_name
from jobs.common.keys import SILENT_S
from jobs.common.rq_jobs import JobStatus, QueueKeys
from jobs.common.workers import read_workers
from jobs.runs.plans.names import is_run_id, job_shard
from jobs.runs.watching.snapshot import RunSnapshot

#: How much of a queue is looked through for the run's first job.
MAX_AHEAD = 1000


def obstacles(connection: Redis, snapshot: RunSnapshot) -> list[str]:
    if snapshot.finished or snapshot.cancelled:
        return []
    # A shard that was started waits too, once the worker that had it is gone.
    waits = snapshot.is_planning or snapshot.queued > 0 or snapshot.shards_started > 0
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
    if waits and snapshot.awaited_second is not None:
        found.append(
            f"no worker on queue {snapshot.second_queue!r} serves model {snapshot.awaited_second}, which is asked "
            "again: start one there"
        )
    if waits and not snapshot.workers:
        found.append(no_worker_text(snapshot.queue, listened_queues(connection)))
    elif waits and not snapshot.shards_started and snapshot.plan_status != JobStatus.STARTED:
        found += _others_first(connection, snapshot)
    return found


def no_worker_text(queue: str, others: Sequence[str]) -> str:
    listening = f" (workers listen on {', '.join(map(repr, others))})" if others else ""
    return (
        f"no worker listens on queue {queue!r}{listening}: start one with "
        f"`rq worker --worker-class worker.BatchWorker -S json {safe_name(queue)}`"
    )


def listened_queues(connection: Redis) -> list[str]:
    return sorted({name for each in read_workers(connection) for name in each.queues})


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
