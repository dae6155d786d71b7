"""What keeps a worker's memory flat."""

from __future__ import annotations

from tests.rq_workers import Workers


def test_arrow_takes_memory_from_the_system_unless_told_otherwise(workers: Workers) -> None:
    job = workers.queue("bulk").enqueue("tests.worker.functions.arrow_allocator")
    workers.burst()
    assert workers.result(job).return_value == "system"
