"""The same jobs on RQ's own worker and on ours leave the same keys behind, value by value."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from rq import Callback, Queue, RateLimit, Repeat, Retry
from rq.group import Group
from rq.job import Dependency

from tests.rq_workers import Workers, wait_until
from tests.worker.redis_state import state_of

F = "tests.worker.functions."


def results_and_times_to_live(bulk: Queue, high: Queue) -> None:
    bulk.enqueue(F + "add", 2, b=3, job_id="plain")
    bulk.enqueue(F + "ignore", job_id="returns-nothing", description="words of its own")
    bulk.enqueue(F + "add_later", 1, 1, job_id="coroutine")
    high.enqueue(F + "add", 1, 1, job_id="other-queue")
    bulk.enqueue(F + "add", 1, 1, job_id="at-front", at_front=True)
    bulk.enqueue(F + "report", step=3, job_id="with-meta", meta={"who": "me"})
    bulk.enqueue(F + "add", 1, 1, job_id="no-timeout", job_timeout=-1)
    bulk.enqueue(F + "add", 1, 1, job_id="with-ttl", ttl=600)
    for ttl in (0, 300, -1):
        bulk.enqueue(F + "add", 1, 1, job_id=f"result-ttl{ttl}", result_ttl=ttl)
    for ttl in (0, 300, -1):
        bulk.enqueue(F + "boom", "no", job_id=f"failure-ttl{ttl}", failure_ttl=ttl)


def failures_and_retries(bulk: Queue, high: Queue) -> None:
    bulk.enqueue(F + "boom", "no", job_id="fails")
    bulk.enqueue(F + "no_json", job_id="value-is-no-json")
    bulk.enqueue(F + "leave", job_id="raises-system-exit")
    bulk.enqueue(F + "linger", job_id="passes-its-timeout", job_timeout=1)
    bulk.enqueue(F + "boom", "no", job_id="retries", retry=Retry(max=2))
    bulk.enqueue(
        F + "boom", "no", job_id="retries-at-front", retry=Retry(max=1, enqueue_at_front=True)
    )
    bulk.enqueue(F + "boom", "no", job_id="retries-later", retry=Retry(max=3, interval=[600, 900]))
    bulk.enqueue(
        F + "boom", "no", job_id="retries-with-ttl", retry=Retry(max=1, interval=600), ttl=300
    )
    bulk.enqueue(F + "ask_for_retry", 1, job_id="asks-for-retry")
    bulk.enqueue(F + "always_ask_for_retry", 2, job_id="asks-too-often")
    bulk.enqueue(F + "always_ask_for_retry", 2, interval=600, job_id="asks-for-retry-later")
    bulk.enqueue(F + "always_ask_for_retry", 2, 600, True, job_id="asks-for-the-front-later")
    bulk.enqueue(F + "add", 1, 1, job_id="repeats", repeat=Repeat(times=2))
    bulk.enqueue(F + "add", 1, 1, job_id="repeats-later", repeat=Repeat(times=2, interval=600))
    bulk.enqueue(
        F + "add", 1, 1, job_id="repeats-in-turn", repeat=Repeat(times=3, interval=[0, 600, 900])
    )
    bulk.enqueue(F + "add", 1, 1, job_id="repeats-not-kept", repeat=Repeat(times=1), result_ttl=0)
    bulk.enqueue(F + "boom", "no", job_id="repeats-and-fails", repeat=Repeat(times=2))


def callbacks(bulk: Queue, high: Queue) -> None:
    for name in ("on_success", "on_success_raises"):
        bulk.enqueue(F + "add", 1, 1, job_id=name, on_success=Callback(F + name))
        bulk.enqueue(F + "boom", "no", job_id=f"not-{name}", on_success=Callback(F + name))
    for name in ("on_failure", "on_failure_raises"):
        bulk.enqueue(F + "boom", "no", job_id=name, on_failure=Callback(F + name))
        bulk.enqueue(F + "add", 1, 1, job_id=f"not-{name}", on_failure=Callback(F + name))
    both = {
        "on_success": Callback(F + "on_success_raises"),
        "on_failure": Callback(F + "on_failure"),
    }
    bulk.enqueue(F + "add", 1, 1, job_id="both", **both)
    bulk.enqueue(
        F + "boom", "no", job_id="retry", retry=Retry(max=1), on_failure=Callback(F + "on_failure")
    )
    bulk.enqueue(F + "ask_for_retry", 1, job_id="ask", on_success=Callback(F + "on_success"))
    bulk.enqueue(
        F + "add", 1, 1, job_id="not-kept", on_success=Callback(F + "on_success"), result_ttl=0
    )


def dependents(bulk: Queue, high: Queue) -> None:
    good = bulk.enqueue(F + "add", 1, 1, job_id="good")
    bad = bulk.enqueue(F + "boom", "no", job_id="bad")
    bulk.enqueue(F + "add", 1, 1, job_id="after-good", depends_on=good)
    high.enqueue(F + "add", 1, 1, job_id="after-good-on-high", depends_on=good)
    bulk.enqueue(F + "add", 1, 1, job_id="after-bad", depends_on=bad)
    bulk.enqueue(
        F + "add", 1, 1, job_id="after-all", depends_on=Dependency([good, bad], allow_failure=True)
    )
    bulk.enqueue(
        F + "add", 1, 1, job_id="after-after", depends_on=["after-good", "after-good-on-high"]
    )
    gone = bulk.enqueue(F + "add", 1, 1, job_id="good-and-gone", result_ttl=0)
    bulk.enqueue(F + "add", 1, 1, job_id="after-gone", depends_on=gone)
    retried = bulk.enqueue(
        F + "boom", "no", job_id="bad-and-retried", retry=Retry(max=1, interval=600)
    )
    bulk.enqueue(
        F + "add", 1, 1, job_id="after-retried", depends_on=Dependency(retried, allow_failure=True)
    )
    Group(bulk.connection, "group").enqueue_many(
        bulk,
        [
            Queue.prepare_data(F + "add", (1, 1), job_id="member"),
            Queue.prepare_data(F + "add", (1, 1), job_id="member-not-kept", result_ttl=0),
        ],
    )


def rate_limits(bulk: Queue, high: Queue) -> None:
    limit = RateLimit("one", 1)
    bulk.enqueue(F + "add", 1, 1, job_id="first", rate_limit=limit)
    high.enqueue(F + "boom", "no", job_id="fails", rate_limit=limit)
    bulk.enqueue(F + "boom", "no", job_id="retried", rate_limit=limit, retry=Retry(max=1))
    bulk.enqueue(
        F + "boom", "no", job_id="retried-later", rate_limit=limit, retry=Retry(1, interval=600)
    )
    bulk.enqueue(F + "ask_for_retry", 1, job_id="asks", rate_limit=limit)
    bulk.enqueue(F + "add", 1, 1, job_id="repeats", rate_limit=limit, repeat=Repeat(times=1))
    bulk.enqueue(
        F + "add", 1, 1, job_id="repeats-later", rate_limit=limit, repeat=Repeat(1, interval=600)
    )
    gone = bulk.enqueue(F + "add", 1, 1, job_id="not-kept", rate_limit=limit, result_ttl=0)
    bulk.enqueue(F + "add", 1, 1, job_id="child", rate_limit=limit, depends_on=gone)
    bulk.enqueue(F + "add", 1, 1, job_id="cancelled", rate_limit=limit).cancel()
    bulk.enqueue(F + "add", 1, 1, job_id="last", rate_limit=limit, at_front=True)


def failures_without_a_record(bulk: Queue, high: Queue) -> None:
    bulk.enqueue(F + "boom", "no", job_id="fails")
    bulk.enqueue(F + "boom", "no", job_id="retries", retry=Retry(max=1))
    bulk.enqueue(
        F + "boom", "no", job_id="callback-raises", on_failure=Callback(F + "on_failure_raises")
    )
    bulk.enqueue(F + "always_ask_for_retry", 1, job_id="asks-too-often")
    bulk.enqueue(F + "add", 1, 1, job_id="fine")


def queued_jobs_that_went(bulk: Queue, high: Queue) -> None:
    bulk.enqueue(F + "add", 1, 1, job_id="cancelled").cancel()
    bulk.enqueue(F + "add", 1, 1, job_id="deleted").delete()
    bulk.enqueue(F + "add", 1, 1, job_id="deleted-but-queued").delete(remove_from_queue=False)
    expired = bulk.enqueue(F + "add", 1, 1, job_id="expired", ttl=600)
    bulk.connection.pexpire(expired.key, 1)  # what a ttl does after a longer wait
    wait_until(lambda: not bulk.connection.exists(expired.key))
    bulk.enqueue_in(timedelta(seconds=600), F + "add", 1, 1, job_id="scheduled")
    parent = bulk.enqueue(F + "add", 1, 1, job_id="cancelled-parent")
    bulk.enqueue(F + "add", 1, 1, job_id="child", depends_on=parent)
    parent.cancel()


def copies_that_callbacks_save(bulk: Queue, high: Queue) -> None:
    hook = Callback(F + "on_success_saves")
    bulk.enqueue(F + "add", 1, 1, job_id="saves", on_success=hook)
    bulk.enqueue(F + "add", 1, 1, job_id="not-kept", on_success=hook, result_ttl=0)
    bulk.enqueue(F + "add", 1, 1, job_id="repeats", on_success=hook, repeat=Repeat(times=2))
    parent = bulk.enqueue(F + "add", 1, 1, job_id="parent", on_success=hook)
    bulk.enqueue(F + "add", 1, 1, job_id="child", depends_on=parent)
    hook = Callback(F + "on_failure_saves")
    bulk.enqueue(F + "boom", "no", job_id="fails", on_failure=hook)
    bulk.enqueue(F + "boom", "no", job_id="retried", on_failure=hook, retry=Retry(max=2))
    bulk.enqueue(
        F + "boom", "no", job_id="retried-later", on_failure=hook, retry=Retry(2, interval=600)
    )
    parent = bulk.enqueue(F + "boom", "no", job_id="bad-parent", on_failure=hook)
    bulk.enqueue(F + "add", 1, 1, job_id="after-bad", depends_on=parent)
    bulk.enqueue(F + "add", 1, 1, job_id="freed", depends_on=Dependency(parent, allow_failure=True))


def copies_that_are_saved_while_the_job_runs(bulk: Queue, high: Queue) -> None:
    for name in ("save_own_copy", "save_producers_copy"):
        bulk.enqueue(F + name, job_id=name)
        bulk.enqueue(F + name, job_id=f"{name}-not-kept", result_ttl=0)
        bulk.enqueue(F + name, job_id=f"{name}-repeats", repeat=Repeat(times=1))
        bulk.enqueue(F + name, "no", job_id=f"{name}-fails")
        bulk.enqueue(F + name, "no", job_id=f"{name}-retried", retry=Retry(max=2))
        bulk.enqueue(F + name, "no", job_id=f"{name}-later", retry=Retry(max=2, interval=600))
        parent = bulk.enqueue(F + name, job_id=f"{name}-parent")
        bulk.enqueue(F + "add", 1, 1, job_id=f"{name}-child", depends_on=parent)


NAMES = ("note_exception", "note_and_end", "note_exception")  # the last is never reached
HANDLERS = tuple(word for name in NAMES for word in ("--exception-handler", F + name))

KINDS: list[tuple[Callable[[Queue, Queue], None], tuple[str, ...]]] = [
    (results_and_times_to_live, ()),
    (failures_and_retries, ("--results-ttl", "900")),
    (callbacks, HANDLERS),
    (dependents, ()),
    (rate_limits, ()),
    (failures_without_a_record, ("--disable-default-exception-handler", *HANDLERS)),
    (queued_jobs_that_went, ()),
    (
        copies_that_callbacks_save,
        ("--exception-handler", F + "save_in_handler", "--results-ttl", "900"),
    ),
    (copies_that_are_saved_while_the_job_runs, ()),
]


def run(
    workers: Workers, enqueue: Callable[[Queue, Queue], None], *flags: str, **options: Any
) -> Any:
    workers.redis.flushall()
    enqueue(workers.queue("bulk"), workers.queue("high"))
    workers.burst("--name", "w", *flags, **options)
    counters = ("successful_job_count", "failed_job_count")
    state = state_of(workers.redis)
    if "callbacks" in state:
        state["callbacks"]["value"].sort()
    return {**state, "counts": {name: workers.redis.hget("rq:worker:w", name) for name in counters}}


@pytest.mark.parametrize(
    ("enqueue", "flags"), KINDS, ids=lambda value: getattr(value, "__name__", "")
)
def test_jobs_leave_the_same_state_behind(
    workers: Workers, enqueue: Callable[[Queue, Queue], None], flags: tuple[str, ...]
) -> None:
    expected = run(workers, enqueue, *flags, worker_class="rq.SimpleWorker")
    found = run(workers, enqueue, *flags)
    assert found == expected
