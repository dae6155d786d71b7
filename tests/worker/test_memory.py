"""What keeps a worker's memory flat."""

from __future__ import annotations

import platform

import pytest

from tests.rq_workers import Workers


def test_arrow_takes_memory_from_the_system_unless_told_otherwise(workers: Workers) -> None:
    job = workers.queue("bulk").enqueue("tests.worker.functions.arrow_allocator")
    workers.burst()
    assert workers.result(job).return_value == "system"


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no arenas")
@pytest.mark.parametrize(("told", "arenas"), [({}, 1), ({"MALLOC_ARENA_MAX": "2"}, 2)])
def test_threads_share_one_arena_unless_told_otherwise(
    workers: Workers, monkeypatch: pytest.MonkeyPatch, told: dict[str, str], arenas: int
) -> None:
    monkeypatch.delenv("MALLOC_ARENA_MAX", raising=False)
    job = workers.queue("bulk").enqueue("tests.worker.functions.malloc_arenas")
    workers.burst(**told)
    assert workers.result(job).return_value == arenas
