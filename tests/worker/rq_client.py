"""What a producer does with RQ's client, 2 or 3, without ours; prints what it saw of each feature as JSON."""

import json
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from redis import Redis
from rq import Callback, Queue, Repeat, Retry, Worker
from rq.command import send_stop_job_command
from rq.exceptions import DuplicateJobError
from rq.executions import ExecutionRegistry
from rq.group import Group
from rq.job import Job
from rq.version import VERSION

F = "tests.worker.functions."
WAIT_S = 60
redis = Redis.from_url(sys.argv[1], socket_timeout=None)
queue = Queue("high", connection=redis, serializer="json")


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("it did not happen")
        time.sleep(0.01)


def end_of(job: Job) -> Any:
    until(
        lambda: job.get_status(refresh=True).value in ("finished", "failed", "stopped", "canceled")
    )
    return job.get_status(refresh=False).value


def text_of(job: Job) -> str:
    return str(job.latest_result(timeout=WAIT_S).return_value["choices"][0]["text"])


def hanging(prompt: str = "hang") -> Job:
    job = queue.enqueue("jobs.complete", prompt)
    until(lambda: job.get_status(refresh=True).value == "started")
    return job


def retries() -> Any:
    job = queue.enqueue(F + "boom", "no", retry=Retry(max=2))
    return end_of(job), Job.fetch(job.id, redis, serializer="json").retries_left


def callbacks() -> Any:
    good = queue.enqueue(F + "add", 1, 2, on_success=Callback(F + "on_success"))
    bad = queue.enqueue(F + "boom", "no", on_failure=Callback(F + "on_failure"))
    ends = [end_of(good), end_of(bad)]
    return ends, sorted(entry.decode().split(":")[0] for entry in redis.lrange("callbacks", 0, -1))


def dependents() -> Any:
    parent = queue.enqueue("jobs.complete", "parent", max_tokens=20)
    child = queue.enqueue("jobs.complete", "child", depends_on=parent)
    late = queue.enqueue("jobs.complete", "late", depends_on=child)
    return text_of(child), text_of(late)


def cancelled() -> Any:
    job = hanging()
    job.cancel()
    until(lambda: not ExecutionRegistry(job.id, connection=redis).get_execution_ids())
    return job.get_status(refresh=True).value


def stopped() -> Any:
    job = hanging()
    send_stop_job_command(redis, job.id, serializer="json")
    return end_of(job)


def stopped_execution() -> Any:
    from rq.command import send_stop_execution_command

    job = hanging()
    (execution,) = ExecutionRegistry(job.id, connection=redis).get_execution_ids()
    send_stop_execution_command(redis, job.id, execution)
    return end_of(job)


def scheduled() -> Any:
    return text_of(queue.enqueue_in(timedelta(seconds=0), "jobs.complete", "later"))


def repeated() -> Any:
    job = queue.enqueue("jobs.complete", "again", repeat=Repeat(times=2, interval=0))
    until(lambda: len(job.results()) == 3)
    return len(job.results())


def grouped() -> Any:
    group = Group.create(connection=redis)
    data = [Queue.prepare_data("jobs.complete", args=(text,)) for text in "ab"]
    return [end_of(job) for job in group.enqueue_many(queue, data)], len(group.get_jobs())


def unique() -> Any:
    job = hanging()
    try:
        queue.enqueue("jobs.complete", "twice", job_id=job.id, unique=True)
    except DuplicateJobError:
        job.cancel()
        return "refused"
    return "taken"


def rate_limited() -> Any:
    from rq import RateLimit

    limit = RateLimit("one at a time", 1)
    jobs = [queue.enqueue("jobs.complete", text, rate_limit=limit) for text in "abc"]
    return [end_of(job) for job in jobs]


def running() -> Any:
    """What a worker runs, as other processes are shown it."""
    job = hanging()
    (worker,) = Worker.all(connection=redis)
    found = [execution.job_id for execution in worker.get_current_executions()]
    assert worker.get_current_job_id() == job.id
    until(lambda: redis.ttl(worker.executions_key) > 60)  # however long the job takes
    job.cancel()
    until(lambda: not worker.current_execution_count)
    return [each.replace(job.id, "JOB") for each in found]


def workers_shown() -> Any:
    return [worker.name for worker in Worker.all(connection=redis)]


FEATURES = (
    retries,
    callbacks,
    dependents,
    cancelled,
    stopped,
    scheduled,
    repeated,
    grouped,
    unique,
    workers_shown,
)
NEW_IN_3 = (stopped_execution, rate_limited, running)


def main() -> None:
    """Try one feature after the other."""
    seen = {}
    for feature in (*FEATURES, *(NEW_IN_3 if VERSION >= "3" else ())):
        try:
            seen[feature.__name__] = feature()
        except Exception as error:  # noqa: BLE001  # the test shows what did not work
            seen[feature.__name__] = f"{type(error).__name__}: {error}"
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
