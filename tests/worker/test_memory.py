"""What keeps a worker's memory flat."""

from __future__ import annotations

import gc
import platform
import threading
import weakref

import pytest

from tests.rq_workers import Workers
from worker.threads.functions import FunctionPool

pytestmark = pytest.mark.usefixtures("new_interpreters")


@pytest.fixture(autouse=True)
def told_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers inherit the environment of the tests."""
    for variable in ("ARROW_DEFAULT_MEMORY_POOL", "MALLOC_ARENA_MAX", "MALLOC_MMAP_THRESHOLD_"):
        monkeypatch.delenv(variable, raising=False)


def test_arrow_takes_memory_from_the_system_unless_told_otherwise(workers: Workers) -> None:
    job = workers.queue("bulk").enqueue("tests.worker.functions.arrow_allocator")
    workers.burst()
    assert workers.result(job).return_value == "system"


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have neither")
def test_threads_share_one_arena_and_large_blocks_leave_no_gaps_in_it(workers: Workers) -> None:
    job = workers.queue("bulk").enqueue("tests.worker.functions.glibc_malloc")
    workers.burst()
    assert workers.result(job).return_value == {"arenas": 1, "mapped": 1}


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have neither")
def test_an_operator_has_the_last_word_on_malloc(workers: Workers) -> None:
    job = workers.queue("bulk").enqueue("tests.worker.functions.glibc_malloc")
    workers.burst(MALLOC_ARENA_MAX="2", MALLOC_MMAP_THRESHOLD_=str(1 << 24))
    assert workers.result(job).return_value == {"arenas": 2, "mapped": 0}


def test_a_failed_call_lets_go_of_what_it_used_without_the_collector() -> None:
    """A shard that could not be read has all its texts in its frames."""
    used: list[weakref.ref[set[str]]] = []

    def fail() -> None:
        texts = {"a row"}
        used.append(weakref.ref(texts))
        raise ValueError

    ended = threading.Event()
    pool = FunctionPool(1, "test")
    gc.disable()
    try:
        pool.submit(fail, lambda value, error: ended.set())
        assert ended.wait(10)
        pool.close(10)
        assert used[0]() is None
    finally:
        gc.enable()
