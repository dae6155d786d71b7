"""Failed jobs by cause: what is one cause, what is put back or deleted, and what is told of it."""

import re
from html import unescape

import pytest
from redis import Redis
from starlette.testclient import TestClient

from tests.tokenmill.dashboard.pages.test_pages import act, text_of
from tests.tokenmill.dashboard.test_jobs_seen import end, fail
from tokenmill.dashboard.failures.groups import Group, Remedy, cause_of, fold
from tokenmill.dashboard.failures.index import CHUNK, FailureIndex
from tokenmill.dashboard.failures.rows import FailedRows
from worker.errors import NotAllowed

CLIENT = "jobs.errors.PromptTooLong: {} tokens\ntokenmill: client\n"
SERVER = "jobs.errors.DiskFull: no space on /data/{}\ntokenmill: server\n"
STRANGE = "ValueError: job 3f2a9c0d-1234-4abc-8def-0123456789ab of user {}\n"


def put_three_kinds(redis: Redis) -> None:
    """Sixty failed jobs: 40 whose arguments are wrong, 15 of a full disk, 5 of a user's function."""
    for number in range(60):
        error = CLIENT if number < 40 else SERVER if number < 55 else STRANGE
        queue = "prompts" if number % 2 else "bulk"
        minute = f"2026-01-01T00:{number:02}:00.000000Z"
        fail(redis, f"job-{number:02}", queue, score=1e12 + number, ended_at=minute)
        end(redis, f"job-{number:02}", error.format(number))


def send(page: TestClient, action: str, path: str = "/workers", **fields: object) -> str:
    """Send a form; return the sentence that tells the outcome."""
    found = re.search(r'name="form_token" value="([^"]+)"', page.get(path).text)
    assert found is not None
    sent = {"form_token": found[1], "back": "/failed", **fields}
    answer = page.post(action, data=sent)
    assert answer.status_code == 303, text_of(answer.text)
    to = answer.headers["location"]
    told = re.search(r'class="banner good">([^<]*)<', page.get(to).text)
    assert told is not None
    return unescape(told[1])


@pytest.mark.parametrize(
    ("message", "folded"),
    [
        ("9 tokens", "# tokens"),
        ("41,208 of 40,960 tokens", "# of # tokens"),
        ("run 0123456789abcdef-00017 failed", "run … failed"),
        ("job 3f2a9c0d-1234-4abc-8def-0123456789ab", "job …"),
        ("<object at 0x7f3e67f7a450>", "<object at …>"),
        ("a decade of facades", "a decade of facades"),
    ],
)
def test_ids_and_numbers_tell_no_causes_apart(message: str, folded: str) -> None:
    assert fold(message) == folded


def test_a_cause_says_whether_trying_again_can_help() -> None:
    assert cause_of(CLIENT.format(1)).remedy is Remedy.CLIENT
    assert cause_of(SERVER.format(1)).remedy is Remedy.SERVER
    assert cause_of(STRANGE.format(1)).remedy is Remedy.UNKNOWN
    assert cause_of("").remedy is Remedy.UNKNOWN
    not_allowed = str(NotAllowed("function", "jobs.complte", ""))
    with_class = f"worker.errors.NotAllowed: {not_allowed}\ntokenmill: client\n"
    assert cause_of(with_class).remedy is Remedy.SETTING
    assert cause_of("x\ntokenmill: cancelled\n").remedy is Remedy.CANCELLED
    assert cause_of(STRANGE, is_stopped=True).remedy is Remedy.CANCELLED
    assert cause_of("ValueError: a\n").key != cause_of("ValueError: a\ntokenmill: client\n").key


def test_the_page_shows_each_cause_with_its_count_times_and_newest_job(
    redis: Redis, page: TestClient
) -> None:
    put_three_kinds(redis)
    html = page.get("/failed").text
    text = text_of(unescape(html))
    assert re.search(r"PromptTooLong: 39 tokens Trying again does not help: .* 40 .* job-39", text)
    assert re.search(r"DiskFull: no space on /data/54 Trying again can help, .* 15 .* job-54", text)
    assert re.search(
        r"ValueError: job 3f2a9c0d-\S+ of user 59 It is not known .* 5 .* job-59", text
    )
    assert 'datetime="2026-01-01T00:00:00Z"' in html
    assert 'datetime="2026-01-01T00:59:00Z"' in html
    group = re.search(r'href="/failed\?group=([0-9a-f]+)">DiskFull', html)
    assert group is not None
    listed = page.get(f"/failed?group={group[1]}&queue=bulk").text
    assert re.findall(r'name="job" value="[^"]*job-(\d+)', listed) == [
        str(number) for number in range(54, 39, -2)
    ]
    assert "Only errors with" in text_of(page.get("/failed?text=DISKFULL").text)
    assert "PromptTooLong" not in page.get("/failed?text=DISKFULL").text


def test_a_group_shows_its_newest_jobs_own_message_until_that_job_is_gone() -> None:
    group = Group("bulk", cause_of("ValueError: row 2 (--encoding cp1252)\n"))
    group.add("b", 20.0, "row 2 (--encoding cp1252)")
    group.add("a", 10.0, "row 1 (--encoding cp1251)")
    assert group.message == "row 2 (--encoding cp1252)"
    group.remove("a")
    assert group.message == "row 2 (--encoding cp1252)"
    group.remove("b")
    assert group.message == "row # (--encoding cp#)"
    group.add("c", None, "row 3 (--encoding cp1253)")
    assert group.message == "row 3 (--encoding cp1253)"


def test_a_group_whose_newest_job_is_gone_is_named_after_the_next_one(redis: Redis) -> None:
    put_three_kinds(redis)
    index = FailureIndex(redis)

    def name() -> str:
        index.advance(["bulk", "prompts"], 60.0)
        (group,) = [each for each in index.groups("bulk") if each.cause.kind == "DiskFull"]
        return group.message

    assert name() == "no space on /data/54"
    redis.zrem("rq:failed:bulk", "job-54")
    index.forget("bulk", ["job-54"])
    assert name() == "no space on /data/52"
    assert len(index.jobs_of("bulk")) == index.num_jobs - len(index.jobs_of("prompts")) == 29
    index.close()


def test_ticked_jobs_are_put_back_or_deleted_and_the_outcome_is_one_sentence(
    redis: Redis, page: TestClient
) -> None:
    put_three_kinds(redis)
    ticked = [f'["prompts", "job-{number}"]' for number in (41, 43, 99)]
    ticked.append('["bulk", "job-44"]')
    assert send(page, "/retry", job=ticked) == "3 put back, 1 was gone."
    assert redis.lrange("rq:queue:prompts", 0, -1) == [b"job-41", b"job-43"]
    assert redis.lrange("rq:queue:bulk", 0, -1) == [b"job-44"]
    assert send(page, "/delete", job=['["bulk", "job-46"]', "x"]) == "1 deleted."
    assert not redis.exists("rq:job:job-46")
    assert "11" in text_of(page.get("/failed").text)
    assert send(page, "/retry") == "0 put back."


def test_jobs_that_ask_for_what_is_wrong_are_not_put_back_without_a_word(
    redis: Redis, page: TestClient
) -> None:
    put_three_kinds(redis)
    html = page.get("/failed").text
    assert "<button>Put 20 back</button>" in html
    assert "Retry ticked anyway" in html
    told = send(page, "/retry", job='["bulk", "job-00"]')
    assert "“Retry ticked anyway” puts them back" in told
    told = send(page, "/retry", all=1)
    assert told.startswith("20 put back. 40 stayed, because what they ask for is wrong")
    assert redis.zcard("rq:failed:bulk") + redis.zcard("rq:failed:prompts") == 40
    assert "Retry all" not in page.get("/failed").text, "none would be put back"
    assert "Retry anyway" in page.get("/jobs/job-00").text
    _, text = act(page, "/failed", "/retry", "Retry anyway all 40 jobs")
    assert "40 put back." in text
    assert redis.llen("rq:queue:bulk") + redis.llen("rq:queue:prompts") == 60


def test_a_group_is_put_back_or_deleted_as_a_whole_with_what_came_since_the_page(
    redis: Redis, page: TestClient
) -> None:
    put_three_kinds(redis)
    asked = re.findall(
        r'<summary>Delete</summary>\s*<form[^>]* action="/delete"', page.get("/failed").text
    )
    assert len(asked) == 3, "a cause is deleted at one click"
    fail(redis, "late", ended_at="2026-01-02T00:00:00.000000Z")
    end(redis, "late", SERVER.format(77))
    _, text = act(page, "/failed", "/delete", "DiskFull")
    assert "16 deleted." in text
    assert "No job has failed with this cause any more" in page.get("/failed?group=none").text
    _, text = act(page, "/failed?queue=bulk", "/retry", "Retry all 2 jobs: ValueError")
    assert "2 put back." in text
    assert redis.lrange("rq:queue:bulk", 0, -1) == [b"job-56", b"job-58"]


def test_an_index_reads_each_job_once_and_forgets_those_that_are_gone(redis: Redis) -> None:
    num_jobs = 3 * CHUNK + 1
    with redis.pipeline() as pipe:
        for number in range(num_jobs):
            pipe.zadd("rq:failed:bulk", {f"job-{number}": number})
            pipe.hset(f"rq:job:job-{number}", "ended_at", "2026-01-01T00:00:00.000000Z")
        pipe.execute()
    now = [0.0]
    index = FailureIndex(redis, lambda: now[0])
    index._step(["bulk"])
    assert (index.num_jobs, index.is_whole) == (CHUNK, False)
    index.finish(["bulk"], lambda number: None)
    assert (index.num_jobs, index.is_whole) == (num_jobs, True)

    before = redis.info("commandstats")["cmdstat_hmget"]["calls"]
    redis.zrem("rq:failed:bulk", "job-0", f"job-{num_jobs - 1}")
    redis.zadd("rq:failed:bulk", {"job-5": 1e9, "new": 1e9})
    index.finish(["bulk"], lambda number: None)
    assert index.num_jobs == num_jobs - 1
    assert redis.info("commandstats")["cmdstat_hmget"]["calls"] == before + 2
    assert [group.num_jobs for group in index.groups()] == [num_jobs - 1]
    assert index.groups()[0].first_at == index.groups()[0].last_at

    redis.delete("rq:failed:bulk")
    index.finish([], lambda number: None)
    assert (index.num_jobs, index.groups()) == (0, [])


def test_a_row_is_read_once_until_its_job_has_failed_again(redis: Redis) -> None:
    fail(redis, "one", ended_at="1970-01-01T00:00:01.000000Z")
    end(redis, "one", CLIENT.format(9))
    rows = FailedRows(redis)
    ended = [(1.0, ("bulk", "one"))]
    [row] = rows.read(ended)
    assert row.error == "jobs.errors.PromptTooLong: 9 tokens"

    before = redis.info("commandstats")
    assert rows.read(ended) == [row]
    after = redis.info("commandstats")
    assert after["cmdstat_hmget"] == before["cmdstat_hmget"]

    end(redis, "one", CLIENT.format(10))
    [row_of_second_failure] = rows.read([(2.0, ("bulk", "one"))])
    assert row_of_second_failure.error == "jobs.errors.PromptTooLong: 10 tokens"


def test_a_row_whose_end_is_unknown_is_read_each_time(redis: Redis) -> None:
    fail(redis, "one", ended_at="")  # RQ leaves it so where a job's worker was gone
    end(redis, "one", CLIENT.format(9))
    rows = FailedRows(redis)
    ended = [(0.0, ("bulk", "one"))]
    [first] = rows.read(ended)

    end(redis, "one", CLIENT.format(10))
    [second] = rows.read(ended)
    assert (first.error, second.error) == (
        "jobs.errors.PromptTooLong: 9 tokens",
        "jobs.errors.PromptTooLong: 10 tokens",
    )
