"""Jobs whose prompts are made of the answers of others, on a worker and its real Redis."""

from __future__ import annotations

from typing import Any

from rq.job import Dependency, Job, JobStatus

from tests.rq_workers import Workers
from worker.io_thread.pool.task_files import MAX_OPENING

LINES = "{{ answers | join(' + ') }}"


def text_of(workers: Workers, job: Job) -> Any:
    return workers.result(job, 1).return_value["choices"][0]["text"]


def test_summaries_of_summaries_need_no_function_of_ones_own(workers: Workers) -> None:
    bulk = workers.queue("bulk")
    parts = [
        bulk.enqueue("jobs.complete", f"part {number}", max_tokens=1) for number in range(2 * MAX_OPENING)
    ]
    pairs = [
        bulk.enqueue("jobs.complete", prompt_template=LINES, max_tokens=1, depends_on=[second, first])
        for first, second in zip(parts[::2], parts[1::2], strict=True)
    ]
    top = workers.queue("high").enqueue(
        "jobs.complete", prompt_template="{{ answers[-1] }} of {{ answers | length }}", depends_on=pairs
    )
    words = ("jobs.complete", f"prompt_template={LINES}", "max_tokens:=1", "--job-id", "told")
    workers.rq(
        "enqueue", "-S", "json", "-q", "bulk", "--depends-on", top.id, *words, "--depends-on", parts[0].id
    )
    refused = bulk.enqueue("jobs.complete", "refuse")
    broken = bulk.enqueue(
        "jobs.complete",
        prompt_template="{{ answers[0] }}",
        depends_on=Dependency([refused], allow_failure=True),
    )
    helped = bulk.enqueue(
        "jobs.complete",
        prompt_template="{{ answers[0] or 'none' }}",
        max_tokens=1,
        depends_on=Dependency([refused], allow_failure=True),
    )
    workers.burst()
    assert text_of(workers, pairs[1]) == "echo:echo:part 3 + echo:part 2"
    assert text_of(workers, top) == f"echo:{text_of(workers, pairs[-1])} of {MAX_OPENING}"
    assert text_of(workers, workers.job("told")) == f"echo:{text_of(workers, top)} + echo:part 0"
    assert text_of(workers, helped) == "echo:none"
    assert broken.get_status() is JobStatus.FAILED
    text = workers.result(broken, 1).exc_string
    assert f"answers[0] is null, job {refused.id} has failed" in text
    assert text.rstrip().endswith("tokenmill: client")
