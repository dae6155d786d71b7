"""Failed jobs on the dashboard: each has a page, its reason comes first, what was stopped is told as that."""

import re

from redis import Redis
from starlette.testclient import TestClient

from tests.tokenmill.dashboard.pages.test_pages import RUN, act, put_run, text_of
from tests.tokenmill.dashboard.test_jobs_seen import end, fail


def test_a_link_leads_to_a_jobs_page_and_its_buttons_back_to_it(
    redis: Redis, page: TestClient
) -> None:
    fail(redis, "a_job-1")
    end(redis, "a_job-1", "ValueError: of this very job")
    for listed in ("/", "/failed"):
        assert 'class="id" href="/jobs/a_job-1"' in page.get(listed).text
    assert "of this very job" in page.get("/jobs/a_job-1").text
    html = page.get("/jobs/a_job-1").text
    assert re.search(r'<summary>Delete</summary>\s*<form[^>]* action="/delete"', html)
    to, text = act(page, "/jobs/a_job-1", "/retry")
    assert to.startswith("/jobs/a_job-1?done=")
    assert "1 put back." in text
    assert redis.lrange("rq:queue:bulk", 0, -1) == [b"a_job-1"]
    to, text = act(page, "/jobs/a_job-1", "/cancel-job")
    assert to.startswith("/jobs/a_job-1?done=")
    assert "will not run" in text


def test_a_jobs_page_tells_the_reason_before_the_traceback(redis: Redis, page: TestClient) -> None:
    fail(redis, "one")
    frames = "".join(f'  File "x.py", line {number}\n' for number in range(200))
    end(
        redis,
        "one",
        f"Traceback (most recent call last):\n{frames}ValueError: too\x1b long\ntokenmill: client\n",
    )
    fail(redis, "two")
    end(redis, "two", "ValueError: a line\n")
    text = text_of(page.get("/jobs/one").text)
    assert r"Error ValueError: too\x1b long Traceback (most recent call last):" in text
    assert text.count("x.py") == 200
    assert text_of(page.get("/jobs/two").text).count("ValueError: a line") == 1


def test_shards_that_a_cancel_stopped_are_told_as_that_and_hide_no_failed_job(
    redis: Redis, page: TestClient
) -> None:
    for number in range(60):
        fail(redis, f"{RUN}-{number:05}", score=2e12 + number, status="stopped")
        end(
            redis,
            f"{RUN}-{number:05}",
            "Job stopped by user, its sequences were aborted.\ntokenmill: cancelled\n",
        )
    fail(redis, f"{RUN}-00060", score=3e12)
    end(
        redis,
        f"{RUN}-00060",
        f"jobs.errors.RunCancelled: run {RUN} was cancelled\ntokenmill: cancelled\n",
    )
    overview = text_of(page.get("/").text)
    assert "Job stopped by user" not in overview
    assert f"{RUN}-00060 bulk" in overview
    assert f"{RUN}-00059 bulk" not in overview
    fail(redis, "really", score=1e12)
    end(redis, "really", "ValueError: tokenmill: cancelled\n")
    listed = text_of(page.get("/failed").text)
    assert "Job stopped by user" not in listed
    assert re.search(
        r"stopped by a cancel Somebody stopped it\. It runs if it is put back\. 61 ", listed
    )
    assert "ValueError: tokenmill: cancelled It is not known" in listed


def test_jobs_of_a_cancelled_run_are_not_put_back(redis: Redis, page: TestClient) -> None:
    put_run(redis, cancelled=1)
    shard = f"{RUN}-00000"
    fail(redis, shard, status="stopped")
    end(redis, shard, "Job stopped by user, its sequences were aborted.\ntokenmill: cancelled\n")
    _, text = act(page, f"/jobs/{shard}", "/retry")
    assert "0 put back. 1 of cancelled runs stayed: `tokenmill submit`" in text
    fail(redis, "one")
    end(redis, "one")
    _, text = act(page, "/failed", "/retry", "Put up to 2 back")
    assert "1 put back. 1 of cancelled runs stayed" in text
    assert redis.lrange("rq:queue:bulk", 0, -1) == [b"one"]
