"""Forms that would end the worker that compiles them, or hold it up, through a real worker."""

import time
from typing import Any

import pytest
from rq.job import JobStatus

from tests.e2e.conftest import RealWorkers
from tests.engine.test_form_trials import chain, references

GREEDY: dict[str, Any] = {"max_tokens": 4, "temperature": 0}


@pytest.mark.long
def test_hostile_forms_fail_by_name_and_prompts_beside_them_wait_for_none(
    workers: RealWorkers,
) -> None:
    """Urgent ones, and those of their own lane; in an order in which the forms come first."""
    hostile = [
        {"grammar": chain(8_000, "r")},
        {"grammar": chain(30_000, "T")},
        {"json": references(12_000)},
        {"grammar": "start: " + " | ".join(f'"x{place} y z"' for place in range(70_000))},
        {"choice": [f"{place:x}" for place in range(60_000)]},
    ]
    bulk, high = workers.queue("bulk"), workers.queue("high")
    process = workers.start()
    workers.result(
        bulk.enqueue("jobs.complete", "warm", structured_outputs={"regex": "a"}, **GREEDY)
    )
    attacks = [
        bulk.enqueue("jobs.complete", "a", structured_outputs=form, **GREEDY) for form in hostile
    ]
    waits = []
    for number in range(20):
        queue = (bulk, high)[number % 2]
        sent = time.monotonic()
        workers.result(queue.enqueue("jobs.complete", f"hello {number}", **GREEDY))
        waits.append(time.monotonic() - sent)
    assert (
        max(waits) < 10
    )  # some tens of milliseconds each on a machine that has nothing else to do
    for job, form in zip(attacks, hostile, strict=True):
        workers.result(job)
        assert job.get_status(refresh=True) == JobStatus.FAILED
        assert f"structured_outputs.{next(iter(form))}" in str(job.latest_result().exc_string)
    again = bulk.enqueue(
        "jobs.complete", "a", structured_outputs={"choice": ["yes", "no"]}, **GREEDY
    )
    assert workers.result(again).return_value["choices"][0]["text"] in ("yes", "no")
    assert process.poll() is None
