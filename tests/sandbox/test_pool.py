"""Children: their limits, and that one which ends costs a retry and nothing else."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sandbox import Child, ChildDied, ChildFailed, ChildOutOfMemory, ChildTooSlow, Limits, Pool

pytestmark = pytest.mark.processes

TASKS = "tests.sandbox.tasks"
LIMITS = Limits(30.0, 64 << 20)  # of what takes milliseconds


@pytest.fixture
def pool() -> Iterator[Pool]:
    found = Pool()
    yield found
    found.close(kill=True)


def ask(pool: Pool, task: str, limit_s: float = LIMITS.seconds, **question: Any) -> dict[str, Any]:
    return pool.call(lambda child: child.ask(f"{TASKS}:{task}", question, Limits(limit_s)))[0]


def test_a_child_replies_with_a_message_and_with_bytes_and_serves_the_next_one_too(
    pool: Pool,
) -> None:
    with pool.lent() as child:
        ((message, body),) = child.replies(f"{TASKS}:echo", {"a": "é"}, LIMITS, b"bytes" * 100_000)
        assert (message["a"], body) == ("é", b"bytes" * 100_000)
    assert ask(pool, "echo")["pid"] == message["pid"]


def test_many_replies_come_one_by_one_and_who_leaves_off_ends_the_task_alone(pool: Pool) -> None:
    with pool.lent() as child:
        numbers = child.replies(f"{TASKS}:count", {"to": 5}, LIMITS)
        assert [message["number"] for message, _ in numbers] == [0, 1, 2, 3, 4]
    with pool.lent() as child:
        numbers = child.replies(f"{TASKS}:count", {"to": 5}, LIMITS)
        next(numbers)
        numbers.close()
        assert child.ask(f"{TASKS}:echo", {}, LIMITS)[0]["pid"] == child.pid


def test_a_child_that_is_killed_costs_a_retry_and_nothing_else(pool: Pool, tmp_path: Path) -> None:
    before = ask(pool, "echo")["pid"]
    assert ask(pool, "die_once", mark=str(tmp_path / "mark"))["pid"] != before
    with pytest.raises(ChildDied, match="ended its process with -9"):
        ask(pool, "die")
    assert ask(pool, "echo", a=1)["a"] == 1


def test_children_that_were_killed_while_they_waited_are_not_asked(pool: Pool) -> None:
    with pool.lent() as first, pool.lent() as second:
        pids = {first.pid, second.pid}
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    for child in (first, second):
        child._process.wait()
    assert ask(pool, "echo")["pid"] not in pids


@pytest.mark.parametrize("task", ["sleep", "spin"])
def test_who_sleeps_and_who_computes_without_end_meets_the_wall_clock(
    pool: Pool, task: str
) -> None:
    ask(pool, "echo")
    began = time.monotonic()
    with pytest.raises(ChildTooSlow, match=r"went on for more than 0\.3 s"):
        ask(pool, task, limit_s=0.3)
    assert time.monotonic() - began < 20
    assert ask(pool, "echo", a=1)["a"] == 1


def test_memory_is_limited_by_the_system(pool: Pool) -> None:
    def fill(mebibytes: int) -> dict[str, Any]:
        question = {"bytes": mebibytes << 20}
        return pool.call(lambda child: child.ask(f"{TASKS}:fill", question, LIMITS))[0]

    assert fill(30) == {"size": 30 << 20}
    with pytest.raises(ChildOutOfMemory, match="took more than 64 MiB"):
        fill(100)
    assert fill(30)


def test_a_child_has_no_secrets_few_files_a_limit_of_cpu_time_and_nothing_heavy(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("RQ_REDIS_URL", "redis://:secret@host")
    found = ask(pool, "surroundings")
    assert not {"AWS_SECRET_ACCESS_KEY", "RQ_REDIS_URL"} & set(found["environment"])
    assert 0 < found["cpu_s"] < 2 * LIMITS.seconds
    assert not {"torch", "redis", "rq", "numpy"} & set(found["modules"])
    with pytest.raises(ChildFailed, match="Too many open files"):
        ask(pool, "open_files")


def test_a_task_gets_from_its_worker_what_it_may_not_open_itself(pool: Pool) -> None:
    def serve(wanted: Any) -> bytes:
        if wanted["name"] == "b":
            raise FileNotFoundError("no b here")
        return b"contents"

    with pytest.raises(FileNotFoundError), pool.lent() as child:  # noqa: PT012  # it comes with the second
        replies = child.replies(f"{TASKS}:fetch", {}, LIMITS, fetch=serve)
        assert next(replies)[0] == {"found": "contents"}
        next(replies)


def test_a_child_ends_with_its_worker() -> None:
    child = Child()
    child.ask(f"{TASKS}:echo", {}, LIMITS)
    child._channel.close()
    assert child._process.wait(timeout=30) == 0


def test_a_pool_that_is_closed_ends_who_is_at_a_task(pool: Pool) -> None:
    ask(pool, "echo")
    closing = threading.Timer(0.2, pool.close, kwargs={"kill": True})
    closing.start()
    with pytest.raises(ChildDied):
        ask(pool, "sleep", limit_s=60.0)
    closing.join()
