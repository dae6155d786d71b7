"""What is shown of failed jobs: newest first, with the error's class, never what a job holds; in bounds."""

import json
import zlib
from base64 import b64encode
from typing import Any

import pytest
from redis import Redis

from jobs.queues import requeue
from tokenmill.dashboard.seen.jobs_seen import MAX_ERROR_CHARS, newest_failed, read_failed, read_job

ERROR = 'Traceback (most recent call last):\n  File "x.py"\njobs.errors.PromptTooLong: 9 tokens\n'


def fail(
    redis: Redis, job_id: str, queue: str = "bulk", score: float = 1e12, **fields: Any
) -> None:
    """Write what a worker writes of a failed job. fields: of its hash, instead of a worker's."""
    payload = zlib.compress(json.dumps(["jobs.complete", None, ["secret words"], {}]).encode())
    usual = {
        "data": payload,
        "origin": queue,
        "status": "failed",
        "ended_at": "2026-01-01T00:00:00.000000Z",
    }
    redis.hset(f"rq:job:{job_id}", mapping={**usual, **fields})
    redis.zadd(f"rq:failed:{queue}", {job_id: score})
    redis.sadd("rq:queues", f"rq:queue:{queue}")


def end(redis: Redis, job_id: str, error: str = ERROR) -> None:
    packed = b64encode(zlib.compress(error.encode()))
    redis.xadd(f"rq:results:{job_id}", {"type": 2, "exc_string": packed, "created_at": "0"})


def test_failed_jobs_come_newest_first_over_all_queues(redis: Redis) -> None:
    for i in range(30):
        fail(redis, f"job-{i}", "bulk" if i % 2 else "prompts", 1e12 + i)
    newest = newest_failed(redis, ["bulk", "prompts", "no such"], 5)
    assert [each.job_id for each in newest] == [f"job-{i}" for i in (29, 28, 27, 26, 25)]
    assert {each.queue for each in newest} == {"bulk", "prompts"}


def test_a_failed_job_shows_function_time_and_error_without_the_line_for_programs(
    redis: Redis,
) -> None:
    fail(redis, "one", meta=json.dumps({"producer": "team a", "note": "secret"}))
    end(redis, "one", f"{ERROR}tokenmill: client")
    [seen] = read_failed(redis, [("one", "bulk")])
    assert seen.producer == "team a"
    assert (seen.function, seen.ended_at) == ("jobs.complete", 1767225600.0)
    assert seen.error == "jobs.errors.PromptTooLong: 9 tokens"
    assert "secret" not in repr(seen)


def test_a_job_in_detail_shows_its_arguments_only_when_asked(redis: Redis) -> None:
    shown = json.dumps({"rows_done": 7, "tokens": "x"})
    fail(
        redis,
        "one",
        tokenmill_progress=shown,
        meta=json.dumps({"rows_done": 8, "note": "secret words"}),
    )
    end(redis, "one")
    seen = read_job(redis, "one")
    assert seen is not None
    assert (seen.arguments, seen.progress, seen.is_failed) == (None, {"rows_done": 7}, True)
    assert "secret" not in repr(seen)
    assert seen.error == ERROR
    asked = read_job(redis, "one", with_arguments=True)
    assert asked is not None
    assert "secret words" in (asked.arguments or "")
    assert read_job(redis, "none") is None
    requeue(redis, "bulk", ["one"])
    again = read_job(redis, "one")
    assert again is not None
    assert (again.is_failed, again.texts["status"]) == (False, "queued")


@pytest.mark.parametrize("data", [b"\x80\x04junk", b"[1,2,3,4]", b"x" * (1 << 17)])
def test_a_payload_that_is_no_json_call_or_too_large_names_no_function(
    redis: Redis, data: bytes
) -> None:
    fail(redis, "one", data=data)
    [seen] = read_failed(redis, [("one", "bulk")])
    assert seen.function is None
    one = read_job(redis, "one", with_arguments=True)
    assert one is not None
    assert (one.function, one.arguments) == (None, None)


def test_jobs_that_are_gone_hide_no_other(redis: Redis) -> None:
    fail(redis, "good", score=3e12)
    redis.zadd("rq:failed:bulk", {"gone": 1e12})
    seen = newest_failed(redis, ["bulk"], 10)
    assert [(each.job_id, each.function) for each in seen] == [
        ("good", "jobs.complete"),
        ("gone", None),
    ]
    assert read_job(redis, "gone") is None


def test_a_long_error_is_cut_at_its_beginning_and_shows_nothing_that_a_page_may_obey(
    redis: Redis,
) -> None:
    fail(redis, "one")
    end(redis, "one", "\x1b[2J" + "line\n" * 100_000 + "ValueError: the end")
    seen = read_job(redis, "one")
    assert seen is not None
    assert len(seen.error) == MAX_ERROR_CHARS
    assert seen.error.endswith("line\nValueError: the end")
    assert "\x1b" not in seen.error
