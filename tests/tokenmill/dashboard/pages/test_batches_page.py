"""The page of the API servers' batches, and of the projects that were limited."""

import json

from redis import Redis
from starlette.testclient import TestClient

from jobs.runs.watching.api_records import BatchRecord, record_batch, record_limited
from tests.tokenmill.dashboard.pages.test_pages import HOSTILE, RUN, put_run, text_of

OTHER_RUN = "fedcba9876543210"
NOW = 1_800_000_000


def put_batch(redis: Redis, name: str, project: str, run: str = RUN, created_at: int = NOW) -> None:
    record_batch(redis, BatchRecord(name, project, run, created_at, created_at + 86400))


def test_without_batches_the_page_says_what_takes_some(page: TestClient) -> None:
    text = text_of(page.get("/batches").text)
    assert "tokenmill serve --folder DIR" in text
    assert "No project was refused." in text


def test_batches_have_their_state_counts_and_deadline(redis: Redis, page: TestClient) -> None:
    put_run(redis)
    put_batch(redis, "batch_1", "search")
    put_batch(redis, "batch_2", "mail", OTHER_RUN, NOW + 1)
    text = text_of(page.get("/batches").text)
    expected = (
        f"batch_1 search in_progress 0 100 0 2027-01-15 08:00:00 UTC 2027-01-16 08:00:00 UTC {RUN}"
    )
    assert expected in text
    assert (
        f"batch_2 mail unknown – – – 2027-01-15 08:00:01 UTC 2027-01-16 08:00:01 UTC {OTHER_RUN}"
        in text
    )
    assert text.index("batch_2") < text.index("batch_1"), "the latest is first"

    text = text_of(page.get("/batches?project=search").text)
    assert "batch_1" in text
    assert "batch_2" not in text
    assert page.get("/batches?project=nobody").status_code == 404


def test_a_limited_project_is_shown_with_its_last_refusal(redis: Redis, page: TestClient) -> None:
    record_limited(redis, "search", "rate_limit_exceeded", NOW)
    record_limited(redis, "search", "rate_limit_exceeded", NOW + 5)
    html = page.get("/batches").text
    assert text_of(html).count("search rate_limit_exceeded") == 1
    assert "2027-01-15T08:00:05Z" in html


def test_what_producers_write_there_is_text_or_left_out(redis: Redis, page: TestClient) -> None:
    records = [
        {"id": HOSTILE, "project": HOSTILE, "run": RUN, "created_at": 1, "expires_at": 2},
        {"id": "b", "project": "p", "run": HOSTILE, "created_at": 1, "expires_at": 2},
        {"id": "b", "project": 3, "run": RUN, "created_at": 1, "expires_at": 2},
        {"id": "b", "project": "p", "run": RUN, "created_at": -1, "expires_at": 1e400},
        [],
    ]
    for score, record in enumerate(records):
        redis.zadd("tokenmill:run:api-batches", {json.dumps(record): score})
    redis.zadd("tokenmill:run:api-batches", {b"\xff": 9})
    redis.hset(
        "tokenmill:run:api-limited", mapping={HOSTILE: "1", "p l": "never", b"\xff": b"\xff"}
    )
    answer = page.get("/batches")
    assert answer.status_code == 200
    assert "<img src=x" not in answer.text
    assert answer.text.count('id="batch-') == 1
    assert answer.text.count('id="limited-') == 1
    redis.delete("tokenmill:run:api-batches")
    redis.set("tokenmill:run:api-batches", "x")
    assert page.get("/batches").status_code == 503
