"""A run's end is told to a webhook and a function, at least once for each submission that asks for it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from rq.job import Job

from jobs.common.keys import run_key
from jobs.context import JobContext
from jobs.errors import InvalidJob, RunCancelled
from jobs.parquet import run_folder
from jobs.runs.control import retry_run, submit_run
from jobs.runs.post_end import PAUSES_S, post_run_end
from jobs.runs.redis_state.end_calls import EndCalls
from jobs.runs.refusals import WebhookFailed, WebhookRefused
from jobs.table import own_function
from tests.jobs.answering import queued_jobs, refuse, run_task, work_off
from tests.jobs.conftest import Invoke

MakeContext = Callable[[], JobContext]
WEBHOOK, ON_END = "http://example.com/end", "mine.done"
ENDS = ("jobs.post_run_end", ON_END)


@pytest.fixture
def make_context(make_context: MakeContext) -> MakeContext:
    hosts, functions = frozenset({"example.com", "127.0.0.1"}), frozenset({ON_END})
    return lambda: replace(make_context(), webhook_hosts=hosts, allowed_functions=functions)


def work(redis: Redis, make_context: MakeContext, **how: Any) -> list[Job]:
    """Work off all but what is told of ends; return those jobs."""
    while any(job.func_name not in ENDS for job in queued_jobs(redis)):
        told = [job for job in queued_jobs(redis) if job.func_name in ENDS]
        for job in told:
            redis.lrem("rq:queue:bulk", 1, job.id)
        with suppress(RunCancelled):  # of shards that a stop has taken from the queue
            work_off(redis, make_context, **how)
        for job in told:
            redis.rpush("rq:queue:bulk", job.id)
    return queued_jobs(redis)


def submit(invoke: Invoke, source: Path, output: Path, *options: object) -> str:
    told = invoke("submit", source, output, "--webhook", WEBHOOK, "--on-end", ON_END, *options)
    assert told.exit_code == 0, told.output
    return str(told.stdout.strip())


def test_the_end_is_told_once_for_each_submission(
    invoke: Invoke, redis: Redis, make_context: MakeContext, source: Path, tmp_path: Path
) -> None:
    run = submit(invoke, source, tmp_path / "out", "--rows-per-shard", 2)
    content = {
        "run": run,
        "state": "finished",
        "output": str(tmp_path / "out"),
        "rows": 5,
        "rows_done": 5,
        "errors": 1,
        "shards": 3,
        "reason": None,
    }
    post, call = work(redis, make_context)
    assert (post.func_name, *post.args) == ("jobs.post_run_end", WEBHOOK, content)
    assert (call.func_name, *call.args, call.retries_left) == (ON_END, content, 3)
    assert (
        submit(invoke, source, tmp_path / "out", "--rows-per-shard", 2) == run
    )  # the same run, finished already
    assert len(work(redis, make_context)) == 4
    invoke("submit", source, tmp_path / "out", "--rows-per-shard", 2)  # asks for nothing
    assert len(work(redis, make_context)) == 4
    submit(invoke, source, tmp_path / "out", "--rows-per-shard", 2)
    work(redis, make_context)
    retry_run(redis, run)  # is told as the submission before
    assert len(work(redis, make_context)) == 8


def test_a_shards_result_says_how_many_of_its_errors_gave_no_prompt(
    invoke: Invoke, redis: Redis, make_context: MakeContext, source: Path, tmp_path: Path
) -> None:
    invoke("submit", source, tmp_path / "out")
    work_off(redis, make_context)
    (shard,) = queued_jobs(redis)
    for unasked in (1, None):  # None where its part is there
        told = run_task(make_context(), shard.func_name, *shard.args, answer=lambda request: refuse("no"))
        assert (told["rows"], told["errors"], told["rows_unasked"]) == (5, 5, unasked)


def test_a_run_that_is_stopped_is_told_too(
    invoke: Invoke, redis: Redis, make_context: MakeContext, source: Path, tmp_path: Path
) -> None:
    submit(invoke, source, tmp_path / "out", "--rows-per-shard", 1, "--max-errors", 0)
    _, call = work(redis, make_context, answer=lambda request: refuse("no"))
    (content,) = call.args
    assert (content["state"], content["errors"]) == ("stopped", 1)
    assert "1 of 1 rows have an error" in content["reason"]


def test_a_run_that_a_person_cancels_is_told_once_planned_or_not(
    invoke: Invoke, redis: Redis, make_context: MakeContext, source: Path, tmp_path: Path
) -> None:
    run = submit(invoke, source, tmp_path / "out", "--rows-per-shard", 1)
    assert "1 jobs removed" in invoke("cancel", run).stdout  # its planning
    _, call = queued_jobs(redis)
    content = {"run": run, "state": "cancelled", "output": str(tmp_path / "out"), "reason": None}
    unplanned = {"rows": None, "shards": None, "rows_done": 0, "errors": 0}
    assert call.args == [{**content, **unplanned}]
    redis.flushall()
    submit(invoke, source, tmp_path / "out", "--rows-per-shard", 1)
    work_off(redis, make_context)
    shard = queued_jobs(redis)[0]
    run_task(make_context(), shard.func_name, *shard.args)
    for _ in range(2):
        invoke("cancel", run)
    post, call = [job for job in queued_jobs(redis) if job.func_name in ENDS]
    assert post.args == [WEBHOOK, {**content, "rows": 5, "shards": 5, "rows_done": 1, "errors": 0}]


def test_a_finished_run_has_no_cancel_to_tell_of(
    invoke: Invoke, redis: Redis, make_context: MakeContext, source: Path, tmp_path: Path
) -> None:
    run = submit(invoke, source, tmp_path / "out")
    work(redis, make_context)
    redis.hdel(run_key(run), "told_submission")  # as where its worker was killed before it told
    assert "nothing was left to cancel" in invoke("cancel", run).stdout
    assert len(queued_jobs(redis)) == 2


def test_an_end_is_told_where_its_worker_was_killed_before(
    invoke: Invoke,
    redis: Redis,
    make_context: MakeContext,
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = submit(invoke, source, tmp_path / "out")
    work_off(redis, make_context)
    (shard,) = queued_jobs(redis)

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(run_folder, "tell_end", killed)
        with pytest.raises(KeyboardInterrupt):
            run_task(make_context(), shard.func_name, *shard.args)
    assert redis.hexists(run_key(run), "finished")
    run_task(make_context(), shard.func_name, *shard.args)  # as its lease ends
    assert [job.func_name for job in queued_jobs(redis)] == ["jobs.score_shard", *ENDS]


def test_what_no_worker_may_call_is_refused_when_the_run_is_planned(
    invoke: Invoke, redis: Redis, make_context: MakeContext, source: Path, tmp_path: Path
) -> None:
    for webhook in ("example.com", "ftp://example.com", "https://", "http://[::1", "http://a\x1b/", 7, ""):
        with pytest.raises(InvalidJob, match="expected a URL"):
            submit_run(redis, "bulk", input=str(source), output=str(tmp_path / "o"), webhook=webhook)
    for webhook in ("https://me:s3cret@example.com/", "http://example.com@evil.org/"):
        with pytest.raises(InvalidJob, match="a URL with user or password") as refused:
            EndCalls.parse(webhook, None)
        assert "s3cret" not in str(refused.value)
    for name in ("done", "mine.", "mine.done()", "a b.c", 7):
        with pytest.raises(InvalidJob, match=r"module\.name"):
            EndCalls.parse(None, name)
    assert queued_jobs(redis) == []
    for arguments, text in (
        ({"webhook": "http://example.com.evil.org/"}, "TOKENMILL_ALLOWED_WEBHOOK_HOSTS"),
        ({"on_end": "os.system"}, "TOKENMILL_ALLOWED_FUNCTIONS"),
    ):
        submit_run(redis, "bulk", input=str(source), output=str(tmp_path / "o"), **arguments)
        (job,) = queued_jobs(redis)
        with pytest.raises(InvalidJob, match=text):
            work_off(redis, make_context)
        job.delete()
    assert not (tmp_path / "o").exists()


class Receiver:
    """A server on this machine that answers with what it is told to."""

    def __init__(self) -> None:
        self.answers: list[int] = []
        self.bodies: list[Any] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.bodies.append((self.path, json.loads(body)))
                self.send_response(receiver.answers.pop(0))
                self.send_header("Location", "http://127.0.0.2:9/elsewhere")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                """Nobody reads it."""

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/end?a=b"
        threading.Thread(
            target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        ).start()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    found = Receiver()
    yield found
    found.server.shutdown()
    found.server.server_close()


def test_a_webhook_is_posted_until_it_is_taken(make_context: MakeContext, receiver: Receiver) -> None:
    pauses: list[float] = []
    receiver.answers = [503, 429, 204]
    assert post_run_end(make_context(), receiver.url, {"run": "x"}, pauses.append) == {"status": 204}
    assert receiver.bodies == [("/end?a=b", {"run": "x"})] * 3
    assert pauses == list(PAUSES_S[:2])
    for status in (404, 302):  # another address may be one that is not allowed
        receiver.answers = [status]
        with pytest.raises(WebhookRefused, match=str(status)):
            post_run_end(make_context(), receiver.url, {}, pauses.append)
    receiver.answers = [500] * 5
    with pytest.raises(WebhookFailed) as caught:
        post_run_end(make_context(), receiver.url, {}, pauses.append)
    assert caught.value.fault == "server"  # so that the job's retries count
    with pytest.raises(WebhookFailed, match="no answer"):
        post_run_end(make_context(), "http://127.0.0.1:9/", {}, pauses.append)


def test_a_job_that_posts_is_held_to_the_hosts_and_to_its_size(
    make_context: MakeContext, receiver: Receiver
) -> None:
    function = own_function("jobs.post_run_end")
    assert function is not None
    for arguments in (
        ("http://localhost:1/", {}),
        (receiver.url, {"a": "x" * 100_000}),
        (receiver.url, [1]),
        (receiver.url, {}, print),
        (receiver.url,),
    ):
        with pytest.raises(InvalidJob):
            function(make_context(), *arguments)
    assert receiver.bodies == []
