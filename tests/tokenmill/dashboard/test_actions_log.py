"""Who did what stands in a log; Redis' user for the dashboard may do all of it."""

from collections.abc import Iterator

import pytest
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from starlette.testclient import TestClient

from tests.rq_workers import ROOT
from tests.tokenmill.dashboard.conftest import TOKEN, Open
from tests.tokenmill.dashboard.pages.test_pages import RUN, put_run, put_worker, text_of
from tests.tokenmill.dashboard.test_failures import SERVER, put_three_kinds, send
from tests.tokenmill.dashboard.test_jobs_seen import end, fail
from tokenmill.dashboard.actions import log
from tokenmill.dashboard.actions.forms import Form
from tokenmill.dashboard.actions.runner import ActionContext, ActionResult, ActionRunner
from tokenmill.dashboard.actions.table import ACTIONS
from tokenmill.dashboard.failures.index import FailureIndex
from tokenmill.dashboard.serve import TOKEN_VARIABLE, TOKENS_VARIABLE, check_tokens
from tokenmill.serving import NotServed

#: A form for each action that does what it says.
FORMS: dict[str, dict[str, object]] = {
    "/retry": {"job": '["bulk", "one"]'},
    "/delete": {"all": 1},
    "/to-front": {"queue": "bulk", "job_id": "one"},
    "/cancel-job": {"job_id": "one"},
    "/empty-queue": {"queue": "bulk", "confirm": "bulk"},
    "/cancel-run": {"run": RUN},
    "/suspend": {},
    "/resume": {},
    "/drain": {"worker": "gpu-1"},
    "/stop": {"worker": "gpu-1"},
}


def test_each_action_stands_in_the_log_with_the_login_that_did_it(
    redis: Redis, open_page: Open
) -> None:
    page = open_page(tokens={"anna": TOKEN, "ben": "another token of many"})
    page.post("/login", data={"token": TOKEN})
    fail(redis, "one")
    end(redis, "one", SERVER.format("x"))
    assert send(page, "/retry", job='["bulk", "one"]') == "1 put back."
    page.post("/login", data={"token": "another token of many"})
    send(page, "/suspend")
    text = text_of(page.get("/actions").text)
    assert "ben suspend all workers No worker claims" in text
    assert "anna retry one 1 put back." in text
    assert text.index("ben suspend") < text.index("anna retry")


def test_without_a_login_the_log_says_so_and_is_bounded(
    redis: Redis, page: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "Nobody has done anything here yet" in page.get("/actions").text
    monkeypatch.setattr(log, "MAX_ENTRIES", 3)
    for _ in range(5):
        send(page, "/resume")
    assert redis.llen("tokenmill:dashboard:actions") == 3
    assert "this machine resume all workers" in text_of(page.get("/actions").text)
    redis.lpush("tokenmill:dashboard:actions", "[", "{}", '{"at": "soon"}')
    assert page.get("/actions").status_code == 200


@pytest.fixture
def as_user(redis: Redis, redis_url: str) -> Iterator[Redis]:
    """Redis as the user `dashboard` of ops/redis-users.acl."""
    lines = (ROOT / "ops" / "redis-users.acl").read_text().splitlines()
    (line,) = [each for each in lines if each.startswith("user dashboard ")]
    redis.execute_command("ACL", "SETUSER", "dashboard", *line.split()[2:])
    with Redis.from_url(redis_url.replace("unix://", "unix://dashboard:change-this-4@")) as client:
        yield client
    redis.execute_command("ACL", "DELUSER", "dashboard")


def test_the_user_that_we_document_may_do_every_action_and_see_every_page(
    redis: Redis, as_user: Redis, open_page: Open
) -> None:
    assert FORMS.keys() == ACTIONS.keys()
    put_three_kinds(redis)
    fail(redis, "one", rate_limit_key="limited", rate_limit_concurrency=2)
    put_run(redis)
    put_worker(redis, "gpu-1")
    page = open_page(as_user)
    for action, fields in FORMS.items():
        told = send(page, action, **fields)
        assert "could not be written" not in told, action
    for path in ("/", "/failed", "/queues/bulk", "/workers", "/workers/gpu-1", "/actions", "/runs"):
        assert page.get(path).status_code == 200, path
    # Redis 6 refuses the name that a client gives itself, which its rules cannot allow alone
    refused = [
        entry
        for entry in redis.acl_log()
        if entry["username"] == "dashboard" and entry["object"] != "client"
    ]
    assert refused == []


def test_as_a_producer_it_shows_what_it_may_and_says_what_it_may_not(
    redis: Redis, as_user: Redis, open_page: Open
) -> None:
    for key in ("rq:suspended", "tokenmill:dashboard:*", "tokenmill:worker-deaths"):
        rules = redis.acl_getuser("dashboard")["keys"]
        if isinstance(rules[0], bytes):  # Redis 6
            rules = [f"~{rule.decode().removeprefix('~')}" for rule in rules]
        kept = [rule for rule in rules if key not in rule]
        redis.execute_command("ACL", "SETUSER", "dashboard", "resetkeys", *kept)
    put_worker(redis, "gpu-1")
    fail(redis, "one")
    end(redis, "one", SERVER.format("x"))
    page = open_page(as_user)
    for path in ("/", "/workers", "/workers/gpu-1", "/failed"):
        assert page.get(path).status_code == 200, path
    assert "give it the rules of" in page.get("/actions").text
    assert "/suspend" not in page.get("/workers").text
    told = send(page, "/retry", "/failed", job='["bulk", "one"]')
    assert told.startswith("1 put back. The log of actions could not be written: ")


def test_a_long_action_goes_on_by_itself_and_is_told_on_all_pages(redis: Redis) -> None:
    runner = ActionRunner(redis, FailureIndex(redis), lambda: now[0])
    now = [1000.0]

    def act(context: ActionContext, form: Form) -> ActionResult:
        context.report("7 put back")
        if form.get("fails"):
            raise RedisConnectionError("gone")
        return ActionResult("retry", "all", "9 put back.")

    for fields, outcome in (
        ({}, "9 put back."),
        ({"fails": ["1"]}, "It ended early, after: 7 put back (gone)."),
    ):
        running = runner.begin(act, "anna", Form(fields))
        runner.leave(running)
        mark = running.future.result(timeout=10)
        assert runner.outcome(mark) == outcome
        assert runner.long_texts() == [outcome]
        now[0] += 60
        assert runner.long_texts() == []

    def refused(context: ActionContext, form: Form) -> ActionResult:
        raise RedisConnectionError("gone")

    running = runner.begin(refused, "anna", Form())
    runner.leave(running)
    assert isinstance(running.future.exception(timeout=10), RedisConnectionError)
    assert runner.long_texts() == ["Nothing was done: gone."]


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({TOKENS_VARIABLE: "anna"}, "at its entry 1"),
        ({TOKENS_VARIABLE: f"a=short,b={TOKEN}"}, "a: has 5 characters"),
        ({TOKENS_VARIABLE: f"a={TOKEN},a={TOKEN}"}, "at its entry 2"),
        ({TOKENS_VARIABLE: f"a b={TOKEN}"}, "at its entry 1"),
        ({TOKEN_VARIABLE: "short"}, "has 5 characters"),
    ],
)
def test_tokens_that_cannot_be_right_are_refused_and_never_shown(
    variables: dict[str, str], reason: str
) -> None:
    with pytest.raises(NotServed) as refused:
        check_tokens(variables, "127.0.0.1")
    assert reason in str(refused.value)
    assert TOKEN not in str(refused.value)


def test_each_person_may_have_a_token_beside_the_shared_one() -> None:
    named = {TOKEN_VARIABLE: "x" * 16, TOKENS_VARIABLE: f"anna={TOKEN}, ben=={TOKEN}"}
    tokens = check_tokens(named, "0.0.0.0")
    assert tokens == {"the shared token": "x" * 16, "anna": TOKEN, "ben": f"={TOKEN}"}
