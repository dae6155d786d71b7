"""Who is answered, what an action needs, and what an answer may do in a browser."""

import asyncio
import re
import socket
from contextlib import ExitStack, suppress
from html import unescape

import pytest
from redis import Redis
from starlette.testclient import TestClient

from tests.tokenmill.dashboard.conftest import TOKEN, Open
from tests.tokenmill.dashboard.dashboard_process import ask, running_dashboard
from tests.tokenmill.dashboard.test_jobs_seen import fail
from tokenmill.dashboard.guard import (
    MAX_CONNECTIONS,
    SESSION_COOKIE,
    SESSION_S,
    LoginThrottle,
    Sessions,
)
from tokenmill.serving import Hosts

RETRY = {"job": '["bulk", "one"]', "back": "/failed"}


def form_token(client: TestClient, path: str = "/failed") -> str:
    found = re.search(r'name="form_token" value="([^"]+)"', client.get(path).text)
    assert found is not None
    return found[1]


@pytest.mark.parametrize(
    ("host", "local", "elsewhere"),
    [
        ("127.0.0.1:9181", True, True),
        ("LOCALHOST", True, True),
        ("[::1]:9181", True, True),
        ("10.0.0.7:9181", False, True),
        ("jobs.example:443", True, True),
        ("evil.example", False, False),
        ("127.0.0.1.evil.example", False, False),
        ("[", False, False),
        ("", False, False),
    ],
)
def test_only_our_own_names_and_addresses_in_numbers_are_answered(
    host: str, local: bool, elsewhere: bool
) -> None:
    assert Hosts(["jobs.example"], is_local=True).allows(host) is local
    assert Hosts(["Jobs.Example"], is_local=False).allows(host) is elsewhere


def test_a_request_under_another_name_learns_nothing(redis: Redis, page: TestClient) -> None:
    fail(redis, "my-job")
    for path in ("/", "/failed", "/series.json", "/static/page.css"):
        answer = page.get(path, headers={"Host": "evil.example"})
        assert (answer.status_code, "my-job" in answer.text) == (403, False)


def test_an_action_needs_post_the_pages_token_and_no_other_sites_origin(
    redis: Redis, page: TestClient
) -> None:
    fail(redis, "one")
    token = form_token(page)
    assert page.get("/retry").status_code == 404
    assert page.post("/retry", data=RETRY).status_code == 403
    assert page.post("/retry", data={**RETRY, "form_token": token + "x"}).status_code == 403
    assert page.post("/retry", data={**RETRY, "form_token": "\u00e9"}).status_code == 403
    for origin in ("http://evil.example", "http://127.0.0.1:1", "null"):
        refused = page.post(
            "/retry", data={**RETRY, "form_token": token}, headers={"Origin": origin}
        )
        assert refused.status_code == 403
    assert redis.zcard("rq:failed:bulk") == 1
    origin = "http://127.0.0.1:9181"
    done = page.post("/retry", data={**RETRY, "form_token": token}, headers={"Origin": origin})
    assert (done.status_code, done.headers["location"][:13]) == (303, "/failed?done=")
    assert redis.lrange("rq:queue:bulk", 0, -1) == [b"one"]


@pytest.mark.parametrize(
    "back", ["//evil.example", "https://evil.example", "/\\evil.example", "x", "/a\nb"]
)
def test_an_action_leads_back_to_our_own_pages_only(
    redis: Redis, page: TestClient, back: str
) -> None:
    fail(redis, "one")
    done = page.post("/retry", data={**RETRY, "form_token": form_token(page), "back": back})
    assert done.headers["location"].startswith("/?done=")
    assert redis.lrange("rq:queue:bulk", 0, -1) == [b"one"]


def test_a_form_that_is_too_large_or_no_form_is_refused(redis: Redis, page: TestClient) -> None:
    fail(redis, "one")
    sent = {**RETRY, "form_token": form_token(page)}
    assert page.post("/retry", data={**sent, "more": "x" * (1 << 17)}).status_code == 403
    assert page.post("/retry", content=b"\xff" * 100).status_code == 403
    assert (
        page.post("/retry", data={**sent, **{str(i): "x" for i in range(300)}}).status_code == 403
    )
    assert redis.zcard("rq:failed:bulk") == 1


def test_with_a_token_nothing_is_shown_or_done_before_a_login(
    redis: Redis, open_page: Open
) -> None:
    fail(redis, "my-job")
    page = open_page(token=TOKEN)
    browser = {"Accept": "text/html"}
    for path in ("/", "/failed", "/runs/x", "/jobs/my-job"):
        answer = page.get(path, headers=browser)
        assert (answer.status_code, answer.headers["location"][:10]) == (303, "/login?to=")
    asked = page.get("/jobs?id=a%0Ab", headers=browser).headers["location"]
    login = re.search(r'name="to" value="([^"]+)"', page.get(asked).text)
    assert login is not None
    assert unescape(login[1]) == "/jobs?id=a%0Ab"
    assert page.get("/series.json").status_code == 401
    assert page.post("/retry", data=RETRY).status_code == 401
    assert page.get("/", headers={"HX-Request": "true"}).headers["HX-Redirect"] == "/login"
    assert "my-job" not in page.get("/login").text
    assert page.get("/static/page.css").status_code == 200


def test_a_login_opens_the_page_and_logging_out_closes_it(redis: Redis, open_page: Open) -> None:
    page = open_page(token=TOKEN)
    wrong = page.post("/login", data={"token": TOKEN[:-1], "to": "/failed"})
    assert (wrong.status_code, SESSION_COOKIE in page.cookies) == (403, False)
    right = page.post("/login", data={"token": TOKEN, "to": "/failed"})
    assert (right.status_code, right.headers["location"]) == (303, "/failed")
    cookie = right.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "samesite=strict" in cookie.lower()
    assert TOKEN not in cookie
    assert page.get("/").status_code == 200
    token = form_token(page, "/")
    page.post("/logout", data={"form_token": "x"})
    assert page.get("/").status_code == 200
    page.post("/logout", data={"form_token": token})
    assert page.get("/", headers={"Accept": "text/html"}).status_code == 303
    elsewhere = page.post("/login", data={"token": TOKEN, "to": "//evil.example"})
    assert elsewhere.headers["location"] == "/"


def test_a_session_outlives_the_server_but_neither_its_time_nor_its_token() -> None:
    tokens = {"anna": TOKEN, "ben": "another token of many"}
    cookie = Sessions(tokens).open("anna", 1000.0)
    assert Sessions(tokens).holder(cookie, 1000.0 + SESSION_S - 1) == "anna"
    assert Sessions({"ann": TOKEN}).holder(cookie, 1000.0) == "ann"
    assert Sessions(tokens).holder(cookie, 1000.0 + SESSION_S) is None
    assert Sessions({"ben": tokens["ben"]}).holder(cookie, 1000.0) is None
    until, _, signature = cookie.partition(".")
    for forged in (
        f"{int(until) + 1}.{signature}",
        until,
        f"{until}.",
        "",
        "x.\udc80",
        f"abc.{signature}",
    ):
        assert Sessions(tokens).holder(forged, 1000.0) is None


def test_the_page_loads_nothing_from_elsewhere_and_holds_no_script_of_its_own(
    page: TestClient,
) -> None:
    answer = page.get("/")
    html, policy = answer.text, answer.headers["Content-Security-Policy"]
    assert "default-src 'none'; script-src 'self'; style-src 'self'" in policy
    assert "unsafe" not in policy
    assert answer.headers["X-Frame-Options"] == "DENY"
    assert answer.headers["Cache-Control"] == "no-store"
    loaded = re.findall(r'(?:src|href)="([^"]+)"', html)
    assert all(each.startswith(("/", "#", "?")) and not each.startswith("//") for each in loaded)
    assert re.findall(r"<script(?![^>]* src=)|<style| style=| on[a-z]+=", html) == []
    for path in (each for each in loaded if each.startswith("/static/")):
        assert page.get(path).status_code == 200


def test_only_whole_names_of_open_paths_are_open(redis: Redis, open_page: Open) -> None:
    page = open_page(token=TOKEN)
    for path in ("/loginx", "/livezz", "/login/x", "/livez/"):
        assert page.get(path).status_code == 401, path
        assert page.get(path, headers={"Accept": "text/html"}).status_code == 303, path


def test_after_ten_wrong_tokens_a_login_waits_for_its_turn() -> None:
    async def tries() -> list[bool]:
        throttle = LoginThrottle(pause_s=0.001)
        for _ in range(10):
            assert await throttle.wait()
            throttle.record(is_right=False)
        return await asyncio.gather(*(throttle.wait() for _ in range(12)))

    assert asyncio.run(tries()) == [True] * 10 + [False] * 2


def test_a_login_that_follows_wrong_ones_still_opens_the_page(open_page: Open) -> None:
    page = open_page(token=TOKEN)
    for _ in range(10):
        assert page.post("/login", data={"token": "wrong"}).status_code == 403
    assert page.post("/login", data={"token": TOKEN}).status_code == 303


@pytest.mark.processes
def test_connections_that_hang_take_nobodys_place() -> None:
    with running_dashboard("redis://127.0.0.1:1") as address, ExitStack() as open_sockets:
        port = int(address.rpartition(":")[2])
        hanging = []
        for _ in range(MAX_CONNECTIONS + 100):
            hanging.append(
                open_sockets.enter_context(socket.create_connection(("127.0.0.1", port)))
            )
            hanging[-1].sendall(b"GET /livez HTTP/1.1\r\n")
        assert ask(address, "/livez").status == 200
        hanging[0].settimeout(60)
        with suppress(ConnectionResetError):
            assert hanging[0].recv(1) == b"", "the oldest has made room"
