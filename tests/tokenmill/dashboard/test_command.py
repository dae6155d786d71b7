"""`tokenmill dashboard` as a command."""

import sys
import time

import pytest
from click.testing import CliRunner

from jobs.cli import main
from tests.tokenmill.dashboard.conftest import TOKEN
from tests.tokenmill.dashboard.dashboard_process import ask, running_dashboard
from tokenmill.dashboard.guard import SESSION_COOKIE, SHARED_LOGIN, Sessions
from tokenmill.dashboard.serve import TOKEN_VARIABLE


def test_without_its_extra_the_command_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "tokenmill.dashboard.serve", None)
    told = CliRunner().invoke(main, ["dashboard"])
    assert told.exit_code == 1
    assert "pip install 'tokenmill[dashboard]'" in told.stderr


@pytest.mark.parametrize(
    ("options", "token", "reason"),
    [
        (["--bind", "0.0.0.0"], None, "can be reached from other machines"),
        (["--bind", "0.0.0.0"], "", "can be reached from other machines"),
        (["--bind", "0.0.0.0"], "too short", "has 9 characters"),
        (["--bind", "192.0.2.1"], TOKEN, "cannot be listened on"),
    ],
)
def test_what_is_not_safe_or_possible_is_refused_in_a_line(
    monkeypatch: pytest.MonkeyPatch, options: list[str], token: str | None, reason: str
) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    if token is not None:
        monkeypatch.setenv(TOKEN_VARIABLE, token)
    told = CliRunner().invoke(main, ["--url", "unix:///nowhere/s", "dashboard", *options])
    assert told.exit_code == 1
    assert reason in told.stderr
    assert "Traceback" not in told.stderr


@pytest.mark.processes
def test_a_dashboard_that_starts_before_redis_asks_for_its_token_and_waits() -> None:
    cookie = f"{SESSION_COOKIE}={Sessions({SHARED_LOGIN: TOKEN}).open(SHARED_LOGIN, time.time())}"
    with running_dashboard("unix:///nowhere/s", **{TOKEN_VARIABLE: TOKEN}) as address:
        for path in ("/series.json", "/failed"):
            assert ask(address, path).status == 401
        page = ask(address, "/", Cookie=cookie)
        assert (page.status, "Redis does not answer" in page.text) == (503, True)
