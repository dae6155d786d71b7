"""What the pages show, of anything that may stand in Redis."""

import json
import re
import time
from html import unescape
from typing import Any

import pytest
from redis import Redis
from rq import Queue
from starlette.testclient import TestClient

from jobs.common.keys import RUN_TTL_S, WORKER_STATS_TTL_S
from tests.tokenmill.dashboard.conftest import Open
from tests.tokenmill.dashboard.test_jobs_seen import end, fail
from tokenmill.dashboard.seen import watcher

HOSTILE = "<img src=x onerror=alert(1)>'\"&\x1b[2J\u202e"
RUN = "0123456789abcdef"


def put_worker(redis: Redis, name: str, silent_s: float = 0.0, **sample: Any) -> None:
    """Write what a worker writes of itself."""
    usual = {
        "state": "busy",
        "model": "m",
        "queues": ["bulk"],
        "max_num_seqs": 64,
        "num_requests_running": 48,
    }
    told = json.dumps({**usual, "updated_at": time.time() - silent_s, **sample})
    redis.sadd("rq:workers", f"rq:worker:{name}")
    redis.hset(f"rq:worker:{name}", mapping={"state": "busy", "queues": "bulk"})
    redis.set(f"tokenmill:worker:{name}", told, px=int((WORKER_STATS_TTL_S - silent_s) * 1000))


def put_run(redis: Redis, run: str = RUN, **facts: Any) -> None:
    """Write what planning writes of a run."""
    usual = {"output": "/data/out", "queue": "bulk", "rows": 100, "shards": 10, "submission": 1}
    redis.hset(f"tokenmill:run:{run}", mapping={**usual, **facts})
    redis.expire(f"tokenmill:run:{run}", RUN_TTL_S)
    for shard in range(10):
        redis.hset(f"rq:job:{run}-{shard:05d}", "status", "queued")
    redis.zadd("tokenmill:run:index", {run: time.time() * 1000})


def text_of(html: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", html))


def test_an_empty_redis_says_what_to_do_next(page: TestClient) -> None:
    text = text_of(page.get("/").text)
    for told in ("No run yet.", "No worker.", "No queue yet", "Failed jobs None."):
        assert told in text
    assert "No job has failed" in text_of(page.get("/failed").text)


def test_the_overview_shows_queues_workers_runs_and_failed_jobs(
    redis: Redis, page: TestClient
) -> None:
    redis.sadd("rq:queues", "rq:queue:bulk")
    redis.rpush("rq:queue:bulk", *range(1234))
    fail(redis, "one")
    end(redis, "one")
    put_worker(
        redis, "node-1", kv_cache_usage=0.5, prompt_tokens=1000, cached_tokens=250, jobs_held=3
    )
    put_run(redis)
    html = page.get("/").text
    text = text_of(html)
    assert "Waiting 1,234 " in text
    assert "Failed 1 " in text
    assert re.search(r"node-1 busy – – 75 % 48/64 50 % 25 % 3 0 s bulk m", text)
    assert f"{RUN} " in text
    assert "0 of 100 0 0 0" in text
    assert re.search(r"bulk 1,234 0 0 0 0 1 ", text)
    assert "jobs.errors.PromptTooLong: 9 tokens" in text
    assert "secret" not in html


def test_the_title_of_a_run_is_its_folder_and_state_also_in_updates(
    redis: Redis, page: TestClient
) -> None:
    put_run(redis, output="/data/<odd>/")
    path = f"/runs/{RUN}"
    assert "<title>&lt;odd&gt;: running · Tokenmill</title>" in page.get(path).text
    put_run(redis, output="/data/out", cancelled=1)
    update = page.get(path, headers={"HX-Request": "true"}).text
    assert "<title>out: cancelled · Tokenmill</title>" in update


def test_while_redis_is_away_an_open_page_stays_as_it_is_and_says_so(open_page: Open) -> None:
    away = open_page(Redis.from_url("unix:///nowhere/s?password=secret"))
    update = away.get("/", headers={"HX-Request": "true"})
    assert (update.status_code, update.headers["HX-Reswap"]) == (200, "none")
    assert "Redis does not answer." in update.text
    page = away.get("/")
    assert page.status_code == 503
    assert 'hx-get="/"' in page.text
    assert "secret" not in update.text + page.text
    assert away.get("/series.json").status_code == 503


def test_what_producers_write_is_text_wherever_it_is_shown(redis: Redis, page: TestClient) -> None:
    redis.sadd("rq:queues", f"rq:queue:{HOSTILE}", b"rq:queue:\xff")
    fail(redis, HOSTILE, queue=HOSTILE, origin=HOSTILE, status=HOSTILE, worker_name=HOSTILE)
    end(redis, HOSTILE, f"ValueError: {HOSTILE}")
    put_run(redis, output=HOSTILE, queue=HOSTILE, model_text=HOSTILE, stopped=HOSTILE, cancelled=1)
    job, queue = (f"/jobs/{quoted(HOSTILE)}", f"/failed?queue={quoted(HOSTILE)}")
    for path in ("/", "/failed", queue, f"/runs/{RUN}", job):
        answer = page.get(path)
        assert answer.status_code == 200, path
        assert "<img src=x" not in answer.text
        assert "\x1b" not in text_of(answer.text)
        assert "&lt;img src=x" in answer.text
        assert re.findall(r" on[a-z]+=", re.sub(r"onerror=alert", "", answer.text)) == []


def quoted(name: str) -> str:
    return "".join(f"%{byte:02X}" for byte in name.encode())


def test_an_outcome_is_told_once_and_no_address_can_put_words_on_a_page(
    redis: Redis, page: TestClient
) -> None:
    fail(redis, "one")
    found = re.search(r'name="form_token" value="([^"]+)"', page.get("/failed").text)
    assert found is not None
    sent = {"form_token": found[1], "job": '["bulk", "one"]', "back": "/failed?queue=bulk"}
    first, second = (page.post("/retry", data=sent).headers["location"] for _ in range(2))
    assert first.startswith("/failed?queue=bulk&done=")
    assert "1 put back." in page.get(first).text
    assert "0 put back, 1 was gone." in page.get(second).text
    assert "done=" not in page.get(first).text
    for odd in ("retried-1", "<b>", "\u0661"):
        text = page.get("/failed", params={"done": odd}).text
        assert 'class="banner good"' not in text


def test_many_workers_and_failed_jobs_come_in_pages_and_those_in_trouble_first(
    redis: Redis, page: TestClient
) -> None:
    with redis.pipeline() as pipe:
        for i in range(300):
            put_worker(pipe, f"node-{i:03}", silent_s=60 if i == 299 else 0, jobs_held=3)
        pipe.zadd("rq:failed:bulk", {f"job-{i}": i for i in range(100_000)})
        pipe.sadd("rq:queues", "rq:queue:bulk")
        pipe.execute()
    html = page.get("/").text
    text = text_of(html)
    assert "Workers 300 1 silent" in text
    assert re.search(r"node-299 silent (– ){6}1 min", text), "nobody knows what it still holds"
    assert "Failed 100,000" in text
    assert "Page 1 of 6" in text
    assert re.findall(r'id="worker-\d+"[^>]*>\s*<th scope="row" title="([^"]+)"', html)[:2] == [
        "node-299",
        "node-000",
    ]
    assert "node-298" in page.get("/?workers=6").text
    assert "node-298" in page.get("/?workers=99999").text
    for odd in ("-1", "x", "9" * 30, "\u0661"):
        assert page.get("/failed", params={"page": odd, "queue": "bulk"}).status_code == 200


def test_the_workers_of_a_run_count_although_there_are_too_many_to_look_at(
    redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watcher, "MAX_WORKERS", 1)
    put_run(redis)
    put_worker(redis, "a")
    put_worker(redis, "b")
    look = watcher.Watcher(redis, time.time).look()
    assert look.num_workers == 2
    assert [run.workers for run in look.runs] == [2]


def test_a_run_shows_its_shards_and_what_it_waits_for(redis: Redis, page: TestClient) -> None:
    put_run(redis)
    text = text_of(page.get(f"/runs/{RUN}").text)
    assert "It waits: no worker listens on queue" in text
    assert "Shards 0 of 10" in text
    assert len(re.findall(r"\bqueued\b", text)) == 10
    for missing in (
        "/runs/ffffffffffffffff",
        "/runs/x",
        "/jobs/none",
        "/nowhere",
        "/failed?queue=none",
    ):
        assert page.get(missing).status_code == 404, missing
        assert page.get(missing, headers={"HX-Request": "true"}).status_code == 200


@pytest.mark.parametrize("show_prompts", [False, True])
def test_a_jobs_page_leads_to_its_dependencies_and_dependents_and_shows_its_meta_when_asked(
    redis: Redis, open_page: Open, show_prompts: bool
) -> None:
    queue, page = (
        Queue("prompts", connection=redis, serializer="json"),
        open_page(show_prompts=show_prompts),
    )
    first = queue.enqueue(
        "jobs.complete",
        "a",
        job_id="first",
        meta={"customer": "blue", "tries": 2, "producer": "team a"},
    )
    queue.enqueue("jobs.complete", "b", job_id="then", depends_on=first)
    shown = text_of(page.get("/jobs/first").text)
    assert re.search(r"Dependents\s+then\s", shown)
    assert re.search(r"Submitted by\s+team a\s", shown)
    assert re.search(r"Created\s+[-0-9: ]+ UTC\s", shown)
    assert ("blue" in shown) is show_prompts
    html = page.get("/jobs/then").text
    assert re.search(r'Depends on.*href="/jobs/first"', html)


def act(page: TestClient, path: str, action: str, words: str = "") -> tuple[str, str]:
    """Send the form of a page as a browser does; return the path it leads to and the page's words there.

    words: which form, if a page has several with this action.
    """
    forms = page.get(path).text.split(f'action="{action}"')[1:]
    form = next(each for each in (one.partition("</form>")[0] for one in forms) if words in each)
    found = re.findall(r'name="(\w+)" value="([^"]*)"', form)
    fields = {name: re.sub(r"\r\n|\r|\n", "\r\n", unescape(value)) for name, value in found}
    to = page.post(action, data=fields).headers["location"]
    return to, text_of(page.get(to).text)


def test_a_run_is_cancelled_from_its_page(redis: Redis, page: TestClient) -> None:
    put_run(redis, shards=3)
    redis.rpush("rq:queue:bulk", *(f"{RUN}-0000{i}" for i in range(2)), "another")
    assert "Finished parts stay." in text_of(page.get(f"/runs/{RUN}").text)
    to, text = act(page, f"/runs/{RUN}", "/cancel-run")
    assert to.startswith(f"/runs/{RUN}?done=")
    assert "The run was cancelled: 2 jobs taken from the queue, 0 told to stop." in text
    assert f"Run {RUN} cancelled" in text
    assert redis.lrange("rq:queue:bulk", 0, -1) == [b"another"]
    assert "/cancel-run" not in page.get(f"/runs/{RUN}").text


def test_a_job_is_cancelled_from_its_page_and_a_runs_job_with_its_run(
    redis: Redis, page: TestClient
) -> None:
    queue = Queue("prompts", connection=redis, serializer="json")
    queue.enqueue("jobs.complete", "secret words", job_id="one")
    to, text = act(page, "/jobs/one", "/cancel-job")
    assert to.startswith("/jobs/one?done=")
    assert "will not run" in text
    assert "Job one canceled" in text
    assert queue.job_ids == []
    queue.enqueue("jobs.complete", "secret words", job_id=f"{RUN}-00000")
    html = page.get(f"/jobs/{RUN}-00000").text
    assert "/cancel-job" not in html
    assert f'href="/runs/{RUN}"' in html
