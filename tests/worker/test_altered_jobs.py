"""A job's own code gets the worker's copy of it, as with RQ: whatever it leaves there ends no worker."""

from typing import Any

from rq import Callback
from rq.job import JobStatus

from tests.rq_workers import Workers, leftovers, text_of

F = "tests.worker.functions."


ENDS: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
    ((F + "alter", "failure_ttl", "soon"), {}, "'soon'"),
    ((F + "alter", "retries_left", "soon"), {}, "'str' and 'int'"),
    ((F + "alter", "result_ttl", "soon", "go"), {}, "soon"),
    ((F + "alter", "repeats_left", "soon", "go"), {}, ""),
    ((F + "ask_for_retry_at_no_time",), {}, "cannot convert float NaN"),
    ((F + "raise_unshowable",), {}, "Unshowable"),
    ((F + "add", 1, 1), {"on_success": Callback(F + "on_success_alters_and_saves")}, "'soon'"),
    (("jobs.complete", "refuse"), {"on_failure": Callback(F + "on_failure_alters")}, "soon"),
]


def test_code_that_alters_its_job_fails_it_and_no_other(workers: Workers) -> None:
    queue = workers.queue("bulk")
    workers.redis.rpush("go", "", "")
    bad = [queue.enqueue(*call, **hooks) for call, hooks, _ in ENDS]
    good = queue.enqueue("jobs.complete", "a", max_tokens=1)
    workers.burst()
    assert good.get_status() == JobStatus.FINISHED
    for job, (call, _, says) in zip(bad, ENDS, strict=True):
        assert job.get_status() == JobStatus.FAILED, call
        assert says in str(workers.result(job).exc_string), call
    assert set(queue.failed_job_registry.get_job_ids()) == {job.id for job in bad}
    assert leftovers(workers.redis, "bulk") == []


def test_a_job_keeps_its_id_whatever_its_function_makes_of_it(workers: Workers) -> None:
    altered = workers.queue("bulk").enqueue(F + "alter", "id", "3m", key="go")
    late = workers.queue("bulk").enqueue(F + "linger", job_timeout=1)
    prompt = workers.queue("bulk").enqueue("jobs.complete", "a", max_tokens=1)
    workers.start()
    assert "maximum timeout value (1 seconds)" in str(
        workers.result(late).exc_string
    )  # limits were looked at
    workers.redis.rpush("go", "")
    assert workers.result(altered).type.name == "SUCCESSFUL"
    assert text_of(workers.result(prompt)) == "echo:a"
