"""A job's own code gets the worker's copy of it, as with RQ: whatever it leaves there ends no worker."""

from __future__ import annotations

from typing import Any

import pytest
from rq import Callback
from rq.job import JobStatus

from tests.rq_workers import Workers, leftovers, text_of

F = "tests.worker.functions."


def end_beside_another(workers: Workers, *job: Any, **options: Any) -> str:
    """Run a job with another one beside it; return the text of its failure."""
    bad = workers.queue("bulk").enqueue(*job, **options)
    good = workers.queue("bulk").enqueue("jobs.complete", "a", max_tokens=1)
    workers.burst()
    assert good.get_status() == JobStatus.FINISHED
    assert bad.get_status() == JobStatus.FAILED
    assert bad.id in bad.failed_job_registry.get_job_ids()
    assert leftovers(workers.redis, "bulk") == []
    return str(workers.result(bad).exc_string)


@pytest.mark.parametrize("field", ["failure_ttl", "retries_left", "id"])
def test_a_function_that_alters_its_job_and_raises_is_a_failed_job(workers: Workers, field: str) -> None:
    end_beside_another(workers, F + "alter", field, "soon")


@pytest.mark.parametrize("field", ["result_ttl", "repeats_left"])
def test_a_function_that_leaves_its_job_without_an_end_and_returns_is_a_failed_job(
    workers: Workers, field: str
) -> None:
    workers.redis.rpush("go", "")
    end_beside_another(workers, F + "alter", field, "soon", key="go")


def test_a_retry_at_no_time_fails_the_job(workers: Workers) -> None:
    assert "cannot convert float NaN" in end_beside_another(workers, F + "ask_for_retry_at_no_time")


def test_an_error_of_which_no_traceback_can_be_made_fails_the_job(workers: Workers) -> None:
    assert "Unshowable: its traceback cannot be shown" in end_beside_another(workers, F + "raise_unshowable")


@pytest.mark.parametrize("name", ["on_success_alters", "on_success_alters_and_saves"])
def test_a_success_callback_that_leaves_no_time_to_live_fails_its_job(workers: Workers, name: str) -> None:
    hook = Callback(F + name)
    text = end_beside_another(workers, "jobs.complete", "b", max_tokens=1, on_success=hook)
    assert "invalid literal for int() with base 10: 'soon'" in text


def test_a_failure_callback_that_leaves_no_time_to_live_fails_its_job(workers: Workers) -> None:
    hook = Callback(F + "on_failure_alters")
    assert "soon" in end_beside_another(workers, "jobs.complete", "refuse", on_failure=hook)


@pytest.mark.parametrize("field", ["timeout", "id"])
def test_a_job_keeps_its_limit_and_its_id_whatever_its_function_makes_of_them(
    workers: Workers, field: str
) -> None:
    altered = workers.queue("bulk").enqueue(F + "alter", field, "3m", key="go")
    late = workers.queue("bulk").enqueue(F + "linger", job_timeout=1)
    prompt = workers.queue("bulk").enqueue("jobs.complete", "a", max_tokens=1)
    workers.start()
    assert "maximum timeout value (1 seconds)" in str(
        workers.result(late).exc_string
    )  # limits were looked at
    workers.redis.rpush("go", "")
    assert workers.result(altered).type.name == "SUCCESSFUL"
    assert text_of(workers.result(prompt)) == "echo:a"
