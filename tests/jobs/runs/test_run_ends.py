"""The end of a run is told to a webhook and a function, once for each submission that asks for it."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from redis import Redis
from rq.command import send_stop_job_command
from rq.job import Job

from jobs.common.keys import run_key
from jobs.common.rq_jobs import executions_key
from jobs.context import Lease
from jobs.errors import InvalidJob, OutputNotWritable, RunCancelled, WebhookFailed, WebhookRefused
from jobs.parquet.outputs import run_folder
from jobs.runs import end_notices
from jobs.runs.control import submit_run
from jobs.runs.end_notices import PAUSES_S, notify_failed, post_run_end
from jobs.runs.plans.names import plan_job_id, shard_job_id
from jobs.runs.redis_state.submission import Submission
from jobs.table import own_function
from tests.jobs.answering import refuse
from tests.jobs.conftest import Invoke, MakeContext
from tests.jobs.local_runs import Runs
from tests.rq_workers import Workers, wait_until
from tests.worker.webhook_server import webhook_server

WEBHOOK, ON_END = "http://example.com/end", "mine.done"
ENDS = ("jobs.post_run_end", ON_END)


@pytest.fixture
def make_context(make_context: MakeContext) -> MakeContext:
    hosts, functions = frozenset({"example.com"}), frozenset({ON_END})
    return lambda: replace(make_context(), webhook_hosts=hosts, allowed_functions=functions)


class Site:
    """A run of three shards, and what is told of it."""

    def __init__(self, redis: Redis, invoke: Invoke, runs: Runs, source: Path) -> None:
        self.redis, self.invoke, self.runs, self.source = redis, invoke, runs, source
        self.run = ""

    def submit(self, *options: object, output: Path | None = None) -> str:
        asked = options or ("--on-end", ON_END)
        told = self.invoke(
            "submit", self.source, output or self.runs.output, "--rows-per-shard", 1, *asked
        )
        assert told.exit_code == 0, told.output
        self.run = str(told.stdout.strip())
        return self.run

    def plan(self) -> Site:
        self.submit()
        self.work()
        return self

    def work(self, **how: Any) -> None:
        """Run what waits, but who is told of an end."""
        with suppress(RunCancelled):  # of shards that a stop has taken from the queue
            self.runs.work(but=ENDS, **how)

    def succeed(self, shard: int) -> None:
        (job,) = [job for job in self.runs.jobs if job.id == shard_job_id(self.run, shard)]
        self.runs.run(job)

    def fail(self, job_id: str, error: str = "PartDamaged: it is cut") -> None:
        """What a worker that holds the job does before it writes such an end."""
        self.redis.zadd(executions_key(job_id), {"execution": 1})
        notify_failed(self.redis, Lease(job_id, "execution"), error)

    def fail_shard(self, shard: int) -> None:
        self.fail(shard_job_id(self.run, shard))

    @property
    def told(self) -> list[dict[str, Any]]:
        return [job.args[0] for job in self.runs.jobs if job.func_name == ON_END]


@pytest.fixture
def site(redis: Redis, invoke: Invoke, runs: Runs, three_rows: Path) -> Site:
    return Site(redis, invoke, runs, three_rows)


@pytest.fixture
def planned(site: Site) -> Site:
    return site.plan()


def test_the_end_is_told_once_for_each_submission(site: Site) -> None:
    asked = ("--webhook", WEBHOOK, "--on-end", ON_END)
    run = site.submit(*asked)
    content = {"run": run, "state": "finished", "output": str(site.runs.output), "reason": None}
    content |= {"rows": 3, "rows_done": 3, "errors": 0, "shards": 3}
    for _ in range(2):
        site.work()
    post, call = site.runs.jobs
    assert (post.func_name, *post.args) == ("jobs.post_run_end", WEBHOOK, content)
    assert (call.func_name, *call.args, call.retries_left) == (ON_END, content, 3)
    assert site.submit(*asked) == run  # finished already
    site.work()
    assert len(site.runs.jobs) == 4
    site.submit("--max-errors", 1)  # asks for nothing
    site.work()
    assert len(site.runs.jobs) == 4


def test_a_run_that_is_stopped_is_told_too(site: Site) -> None:
    site.submit("--on-end", ON_END, "--max-errors", 0)
    for _ in range(2):
        site.work(answer=lambda request: refuse("no"))
    (content,) = site.told
    assert (content["state"], content["errors"]) == ("stopped", 1)
    assert "1 of 1 rows have an error" in content["reason"]


def test_a_run_that_a_person_cancels_is_told_once_planned_or_not(site: Site) -> None:
    run = site.submit()
    assert "1 job removed" in site.invoke("cancel", run).stdout  # its planning
    content = {"run": run, "state": "cancelled", "output": str(site.runs.output), "reason": None}
    assert site.told == [{**content, "rows": None, "shards": None, "rows_done": 0, "errors": 0}]
    site.redis.flushall()
    site.plan().succeed(0)
    for _ in range(2):
        site.invoke("cancel", run)
    for shard in range(3):
        site.fail_shard(shard)  # the stops reach them
    assert site.told == [{**content, "rows": 3, "shards": 3, "rows_done": 1, "errors": 0}]


def test_an_end_is_told_where_its_worker_was_killed_before(
    planned: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    planned.succeed(0)
    planned.succeed(1)
    with monkeypatch.context() as patch:
        patch.setattr(run_folder, "enqueue_notices", killed)
        with pytest.raises(KeyboardInterrupt):
            planned.succeed(2)
    assert planned.redis.hexists(run_key(planned.run), "finished")
    planned.succeed(2)  # as its lease ends
    assert [content["state"] for content in planned.told] == ["finished"]


def test_the_last_shard_to_fail_tells_and_the_others_do_not(planned: Site) -> None:
    planned.fail_shard(0)
    planned.succeed(1)
    assert planned.told == []
    for _ in range(2):  # as where its worker was killed before it wrote the end
        planned.fail_shard(2)
    (content,) = planned.told
    assert content["reason"] == "2 of 3 shards failed, the last one: PartDamaged: it is cut"
    assert (content["state"], content["rows_done"], content["shards"]) == ("failed", 1, 3)


def test_a_shard_that_succeeds_last_tells_of_those_that_have_failed(planned: Site) -> None:
    planned.fail_shard(1)
    for shard in (0, 2):
        assert planned.told == []
        planned.succeed(shard)
    (content,) = planned.told
    assert (content["state"], content["reason"]) == ("failed", "1 of 3 shards failed")
    planned.succeed(1)  # `rq requeue`
    assert [content["state"] for content in planned.told] == ["failed", "finished"]


def test_a_run_all_of_whose_rows_fail_is_told_as_failed(site: Site) -> None:
    site.submit("--webhook", WEBHOOK)
    for _ in range(2):
        site.work(answer=lambda request: refuse("no"))
    (post,) = site.runs.jobs
    address, content = post.args
    assert (post.func_name, address) == ("jobs.post_run_end", WEBHOOK)
    assert (content["state"], content["errors"]) == ("failed", 3)
    assert content["reason"].startswith("all its 3 rows have an error")


def test_planning_that_fails_is_told(site: Site) -> None:
    run = site.submit()
    site.fail(plan_job_id(run), "MissingColumn: no column 'prompt'")
    site.fail(f"{plan_job_id(run)}-webhook")  # no job of a run
    (content,) = site.told
    assert (content["state"], content["rows"], content["shards"]) == ("failed", None, None)
    assert content["reason"] == "its planning failed: MissingColumn: no column 'prompt'"


def test_who_has_lost_the_job_tells_of_no_failure(planned: Site) -> None:
    for shard in range(3):
        job_id = shard_job_id(planned.run, shard)
        notify_failed(planned.redis, Lease(job_id, "another"), "x")
    assert planned.told == []


def test_a_run_whose_end_cannot_be_written_has_failed_and_says_why(planned: Site) -> None:
    (planned.runs.output / "_manifest.json").mkdir()
    planned.succeed(0)
    planned.succeed(1)
    with pytest.raises(OutputNotWritable) as caught:
        planned.succeed(2)
    error = f"{type(caught.value).__name__}: {caught.value}"
    planned.fail(shard_job_id(planned.run, 2), error)
    (content,) = planned.told
    assert (content["state"], content["rows_done"]) == ("failed", 3)
    assert content["reason"] == f"every part is written, but the run did not finish: {error}"


def test_what_no_worker_may_call_is_refused_when_the_run_is_planned(
    redis: Redis, site: Site
) -> None:
    names = {"input": str(site.source), "output": str(site.runs.output)}
    for webhook in ("example.com", "ftp://example.com", 7):
        with pytest.raises(InvalidJob, match="expected a URL"):
            submit_run(redis, "bulk", **names, webhook=webhook)
    with pytest.raises(InvalidJob, match="a URL with user or password") as refused:
        Submission.split("bulk", {"webhook": "https://me:s3cret@example.com/"})
    assert "s3cret" not in str(refused.value)
    with pytest.raises(InvalidJob, match=r"module\.name"):
        Submission.split("bulk", {"on_end": "done"})
    assert site.runs.jobs == []
    for arguments, text in (
        ({"webhook": "http://example.com.evil.org/"}, "TOKENMILL_ALLOWED_WEBHOOK_HOSTS"),
        ({"on_end": "os.system"}, "TOKENMILL_ALLOWED_FUNCTIONS"),
    ):
        submit_run(redis, "bulk", **names, **arguments)
        with pytest.raises(InvalidJob, match=text):
            site.runs.work()
        redis.flushall()
    assert not site.runs.output.exists()


def test_a_webhook_is_posted_until_it_is_taken(
    make_context: MakeContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    def post(*statuses: int) -> tuple[Any, list[float]]:
        answers, pauses = iter(statuses), list[float]()
        monkeypatch.setattr(end_notices, "call_webhook", lambda *_, **__: next(answers))
        monkeypatch.setattr(end_notices.time, "sleep", pauses.append)
        return post_run_end(make_context(), WEBHOOK, {"run": "x"}), pauses

    assert post(503, 429, 204) == ({"status": 204}, list(PAUSES_S[:2]))
    for status in (404, 302):  # another address may be one that is not allowed
        with pytest.raises(WebhookRefused, match=str(status)):
            post(status)
    with pytest.raises(WebhookFailed) as caught:
        post(*[500] * 5)
    assert caught.value.fault == "server"  # so that the job's retries count


def test_a_worker_tells_of_a_planning_that_fails_and_of_a_last_shard_that_is_stopped(
    workers: Workers, redis: Redis, invoke: Invoke, tmp_path: Path
) -> None:
    gate, source = tmp_path / "gate", tmp_path / "in.parquet"
    pq.write_table(pa.table({"prompt": [f"file:{gate}", "b"]}), source)
    workers.start(TOKENMILL_ALLOWED_WEBHOOK_HOSTS="127.0.0.1")
    with webhook_server() as server:
        arguments = {
            "input": str(source),
            "output": str(tmp_path / "refused"),
            "prompt_column": "none",
        }
        refused = submit_run(redis, "bulk", webhook=server.url, **arguments)
        wait_until(lambda: server.received)
        (content,) = server.received
        assert (content["run"], content["state"]) == (refused, "failed")
        assert "its planning failed: MissingColumn" in content["reason"]

        ends = ("--rows-per-shard", 1, "--webhook", server.url)
        run = invoke("submit", source, tmp_path / "out", *ends).stdout.strip()
        stopped = shard_job_id(run, 0)
        wait_until(lambda: (tmp_path / "out" / "part-00001.parquet").exists())
        wait_until(lambda: workers.job(shard_job_id(run, 1)).get_status() == "finished")
        wait_until(
            lambda: Job.exists(stopped, redis) and workers.job(stopped).get_status() == "started"
        )
        send_stop_job_command(redis, stopped)
        wait_until(lambda: len(server.received) == 2)
        assert server.received[1]["reason"] == "1 of 2 shards failed, the last one: it was stopped"
        assert (server.received[1]["run"], server.received[1]["rows_done"]) == (run, 1)
        wait_until(lambda: workers.job(stopped).get_status() == "stopped")


def test_a_job_that_posts_is_held_to_the_hosts_and_to_its_size(make_context: MakeContext) -> None:
    function = own_function("jobs.post_run_end")
    assert function is not None
    for arguments in (
        ("http://localhost:1/", {}),
        (WEBHOOK, {"a": "x" * 100_000}),
        (WEBHOOK, {}, print),
    ):
        with pytest.raises(InvalidJob):
            function(make_context(), *arguments)
