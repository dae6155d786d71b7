"""Queues, workers, runs and the search: every name leads to a page, and each page has its buttons."""

import json
import re
import shlex
import time
from html import unescape
from pathlib import Path

from click.testing import CliRunner
from redis import Redis
from rq import Queue
from starlette.testclient import TestClient

from jobs.cli import main
from jobs.common.keys import WORKER_STATS_TTL_S
from jobs.common.worker_deaths import record_deaths
from jobs.runs.control import submit_run, submitter
from tests.tokenmill.dashboard.conftest import Open
from tests.tokenmill.dashboard.pages.test_pages import (
    HOSTILE,
    RUN,
    put_run,
    put_worker,
    quoted,
    text_of,
)
from tests.tokenmill.dashboard.test_failures import SERVER, send
from tests.tokenmill.dashboard.test_jobs_seen import end, fail
from tokenmill.dashboard.history.marks import MARKS_KEY


def put_queue(redis: Redis) -> Queue:
    queue = Queue("bulk", connection=redis, serializer="json")
    for number in range(120):
        queue.enqueue("jobs.complete", "secret words", job_id=f"job-{number:03}")
    return queue


def test_a_queues_page_lists_what_waits_as_workers_take_it_and_puts_jobs_to_the_front(
    redis: Redis, page: TestClient
) -> None:
    queue = put_queue(redis)
    html = page.get("/queues/bulk").text
    assert re.findall(r'<th scope="row"><a class="id" href="/jobs/([^"]+)"', html) == [
        f"job-{number:03}" for number in range(50)
    ]
    assert "No worker listens on it" in html
    assert "secret" not in html
    assert "120 job-119" not in text_of(html)
    assert "120 job-119 jobs.complete" in text_of(page.get("/queues/bulk?page=3").text)
    told = send(page, "/to-front", queue="bulk", job_id="job-077")
    assert told == "The job is the first of its queue now."
    assert queue.job_ids[:2] == ["job-077", "job-000"]
    told = send(page, "/to-front", queue="bulk", job_id="job-999")
    assert "does not wait any more" in told


def test_each_place_of_a_queue_lists_its_jobs(redis: Redis, page: TestClient) -> None:
    redis.sadd("rq:queues", "rq:queue:bulk")
    soon = time.time() + 7230
    for place, key in (("executing", "wip"), ("finished", "finished"), ("deferred", "deferred")):
        member = "one:execution" if place == "executing" else "one"
        redis.zadd(f"rq:{key}:bulk", {member: soon})
        assert 'href="/jobs/one"' in page.get(f"/queues/bulk?place={place}").text
    redis.zadd("rq:scheduled:bulk", {"one": soon})
    redis.hset("rq:job:one", "worker_name", "gpu 1/2")
    assert "in 2 h 0 min" in text_of(page.get("/queues/bulk?place=scheduled").text)
    assert 'href="/workers/gpu%201/2"' in page.get("/queues/bulk?place=executing").text
    for path in ("/queues/bulk?place=x", "/queues/none"):
        assert page.get(path).status_code == 404


def test_a_queue_is_emptied_only_by_its_name(redis: Redis, page: TestClient) -> None:
    queue = put_queue(redis)
    assert "is not the queue's name" in send(page, "/empty-queue", queue="bulk", confirm="bul")
    assert len(queue.job_ids) == 120
    told = send(page, "/empty-queue", queue="bulk", confirm="bulk")
    assert told == "120 waiting jobs of bulk were deleted."
    assert list(redis.scan_iter("rq:job:*")) == []


def test_a_workers_page_says_where_it_runs_what_it_holds_and_how_it_died_before(
    redis: Redis, page: TestClient
) -> None:
    put_worker(
        redis,
        "gpu-1",
        host="node-7",
        pid=4711,
        version="1.2",
        commit="c0ffee0123" + "9" * 30,
        fingerprint="9f31",
        model_source="/models/m",
        memory_bytes=3 << 30,
        jobs_held=22,
        held_jobs=["job-1", "job-2"],
    )
    put_worker(redis, "silent", silent_s=60, jobs_held=5)
    html = page.get("/workers/gpu-1").text
    assert "Jobs held 22" in text_of(html)
    assert f'title="c0ffee0123{"9" * 30}"' in html
    html = page.get("/workers/silent").text
    assert re.findall(r"<dt>(Batch|Jobs held)</dt><dd>([^<]*)<", html) == [
        ("Batch", "–"),
        ("Jobs held", "–"),
    ]
    for name, is_now in (("gpu-1", True), ("silent", False)):
        told = page.get(f"/series.json?of=worker&name={name}&range=1h")
        assert told.json()["is_now"] == is_now
    record_deaths(redis, {"gpu-1": ["job-8", "job-9"], "other": ["x"]})
    text = text_of(page.get("/workers/gpu-1").text)
    told = ("Host node-7", "Process 4711", "Version 1.2", "Commit c0ffee0123 ", "Fingerprint 9f31")
    for each in (*told, "Loaded from /models/m", "Memory 3.0 GiB", "job-2 and 20 more"):
        assert each in text, each
    assert re.search(r"gpu-1 0 s ago 2 job-8 , job-9", text)
    listed = page.get("/workers").text
    assert 'href="/workers/gpu-1"' in listed
    assert "other" in listed
    assert "Redis knows only its deaths" in page.get("/workers/other").text
    assert page.get("/workers/nobody").status_code == 404
    stopped = json.dumps({"state": "stopped"})
    redis.set("tokenmill:worker:drained", stopped, px=int((WORKER_STATS_TTL_S - 90) * 1000))
    assert "It stopped 1 min 30 s ago" in text_of(page.get("/workers/drained").text)
    redis.delete("tokenmill:worker:drained")
    moment = time.time() - 3 * 3600
    mark = json.dumps({"at": moment, "worker": "drained", "what": "left"})
    redis.zadd(MARKS_KEY, {mark: moment})
    assert "It stopped 3 h 0 min ago" in text_of(page.get("/workers/drained").text)


def test_workers_are_suspended_resumed_drained_and_stopped(
    redis: Redis, page: TestClient, monkeypatch: object
) -> None:
    monkeypatch.setattr("tokenmill.dashboard.actions.workers.SECOND_AFTER_S", 0.0)  # type: ignore[attr-defined]
    put_run(redis)
    put_worker(redis, "gpu-1")
    put_worker(redis, "gpu-2", state="suspended")
    redis.sadd("rq:queues", "rq:queue:bulk")
    assert "No worker claims anything" in send(page, "/suspend", "/workers")
    assert redis.exists("rq:suspended")
    for path in ("/workers", "/queues/bulk", f"/runs/{RUN}", "/runs"):
        assert "all workers are suspended" in page.get(path).text.lower(), path
    assert send(page, "/resume", "/workers") == "The workers claim again."
    assert not redis.exists("rq:suspended")
    assert "does not listen" in send(page, "/drain", "/workers", worker="gpu-1")
    with redis.pubsub() as listening:
        listening.subscribe("rq:pubsub:gpu-1")
        listening.get_message(timeout=5)
        assert "finishes what it has begun" in send(page, "/drain", "/workers", worker="gpu-1")
        assert "gives back all" in send(page, "/stop", "/workers", worker="gpu-1")
        told = [listening.get_message(timeout=5) for _ in range(3)]
    assert [json.loads(each["data"]) for each in told if each] == [{"command": "shutdown"}] * 3


def test_the_search_finds_jobs_runs_workers_and_errors(redis: Redis, page: TestClient) -> None:
    put_run(redis, output="/data/reviews-labelled")
    put_worker(redis, "gpu-1")
    fail(redis, "one")
    end(redis, "one", SERVER.format("x"))
    for text, to in (("one", "/jobs/one"), (RUN, f"/runs/{RUN}")):
        assert page.get("/search", params={"q": text}).headers["location"] == to
    for text, found in (
        ("REVIEWS", f'href="/runs/{RUN}"'),
        ("gpu", 'href="/workers/gpu-1"'),
        ("bul", 'href="/queues/bulk"'),
        ("no space", 'href="/failed?group='),
    ):
        assert found in page.get("/search", params={"q": text}).text, text
    assert "Nothing has this text" in page.get("/search", params={"q": "zebra"}).text
    assert "Nothing has this text" not in page.get("/search").text
    assert "<img src=x" not in page.get("/search", params={"q": HOSTILE}).text


def test_runs_are_a_table_with_reasons_and_a_filter_by_state_those_that_run_first(
    redis: Redis, page: TestClient
) -> None:
    put_run(redis, "a" * 16, finished=1, total_rows=100, total_errors=4, total_cut=7)
    put_run(redis, "b" * 16, plan_error="no column 'prompt'", shards="", rows="", plan_job="gone")
    put_run(redis, "c" * 16, total_rows=40, total_errors=10, submitted_by="anna@desk")
    html = page.get("/runs").text
    assert re.findall(r'<tr id="run-(\w)', html)[0] == "c"
    text = text_of(unescape(html))
    assert "failed planning failed: no column 'prompt'" in text
    assert "by anna@desk" in text
    assert "30 rows answered, 10 failed, 60 left" in html
    assert re.findall(r'<tr id="run-(\w)', page.get("/runs?state=finished").text) == ["a"]
    assert "no column &#39;prompt&#39;" in page.get("/").text


def test_a_runs_page_says_what_it_asks_and_shows_its_template_only_when_asked(
    redis: Redis, page: TestClient, open_page: Open, tmp_path: Path, redis_url: str
) -> None:
    run = submit_run(
        redis,
        "bulk",
        input=f"{tmp_path}/in put.parquet",
        output=f"{tmp_path}/out",
        limit=50,
        max_errors="5%",
        template="Say {secret}",
        sampling={"max_tokens": 7},
    )
    html = page.get(f"/runs/{run}").text
    text = text_of(unescape(html))
    assert "Input " in text
    assert "max tokens 7" in text
    assert f"by {submitter()}" in text
    assert re.search(r"tokenmill submit '\S*in put.parquet' \S*/out with the options", text)
    assert "Say {secret}" not in html
    shown = open_page(show_prompts=True).get(f"/runs/{run}").text
    assert "Say {secret}" in text_of(shown)

    command = re.search(r"<code>tokenmill (submit --[^<]*)</code>", shown)
    assert command is not None, "there is one that submits the same run"
    words = shlex.split(unescape(command[1]))
    done = CliRunner().invoke(main, ["--url", redis_url, *words])
    assert done.exit_code == 0, done.output
    assert run in done.output


def test_a_shards_job_says_who_submitted_its_run(redis: Redis, page: TestClient) -> None:
    put_run(redis, submitted_by="anna on host1")
    Queue("bulk", connection=redis, serializer="json").enqueue("a.b", job_id=f"{RUN}-00000")
    assert "Submitted by anna on host1 " in " ".join(
        text_of(page.get(f"/jobs/{RUN}-00000").text).split()
    )


def test_shards_lead_to_their_jobs(redis: Redis, page: TestClient) -> None:
    put_run(redis)
    html = page.get(f"/runs/{RUN}").text
    assert f'href="/jobs/{RUN}-00003"' in html


def test_names_that_producers_chose_are_text_on_every_page(redis: Redis, page: TestClient) -> None:
    put_worker(redis, HOSTILE, host=HOSTILE, model=HOSTILE, held_jobs=[HOSTILE], queues=[HOSTILE])
    redis.sadd("rq:queues", f"rq:queue:{HOSTILE}")
    redis.rpush(f"rq:queue:{HOSTILE}", HOSTILE)
    redis.hset(f"rq:job:{HOSTILE}", mapping={"origin": HOSTILE, "worker_name": HOSTILE})
    redis.zadd(f"rq:wip:{HOSTILE}", {f"{HOSTILE}:x": 1})
    put_run(redis, submitted_by=HOSTILE)
    fail(redis, HOSTILE, queue=HOSTILE)
    end(redis, HOSTILE, f"ValueError: {HOSTILE}")
    name = quoted(HOSTILE)
    paths = ["/queues", f"/queues/{name}", f"/queues/{name}?place=executing", "/workers"]
    paths += [f"/workers/{name}", "/runs", f"/runs/{RUN}", "/failed", "/search?q=img"]
    for path in paths:
        answer = page.get(path)
        assert answer.status_code == 200, path
        assert "<img src=x" not in answer.text, path
        assert "\x1b" not in text_of(answer.text), path
        assert re.findall(r" on[a-z]+=", re.sub(r"onerror=alert", "", answer.text)) == [], path
