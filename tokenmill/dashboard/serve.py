"""Starts the dashboard, and refuses to show it to others without a token."""

import os
import socket
from collections.abc import Collection, Sequence

from redis import Redis

from tokenmill.dashboard.app import Dashboard, Options
from tokenmill.dashboard.guard import TimedConnection
from tokenmill.serving import REDIS_TIMEOUT_S, NotServed, is_loopback, listen, run_app, start_log

#: With which a browser logs in. Asked for wherever it is set.
TOKEN_VARIABLE = "TOKENMILL_DASHBOARD_TOKEN"
MIN_TOKEN_CHARS = 16


def check_token(token: str | None, bind: str) -> str | None:
    """Return the token that browsers log in with, None for none.

    Raises NotServed if others can reach the address and there is none, or one that can be guessed.
    """
    if token is not None and len(token) < MIN_TOKEN_CHARS:
        raise NotServed(
            f"{TOKEN_VARIABLE} has {len(token)} characters, expected {MIN_TOKEN_CHARS} or more: take the "
            'output of `python -c "import secrets; print(secrets.token_urlsafe())"`'
        )
    if token is None and not is_loopback(bind):
        raise NotServed(
            f"{bind} can be reached from other machines: set {TOKEN_VARIABLE}, which browsers log in with, "
            "or leave --bind at 127.0.0.1 and use a tunnel, such as ssh -L 9181:127.0.0.1:9181"
        )
    return token


def serve(
    redis_url: str,
    bind: str,
    port: int,
    hosts: Collection[str],
    *,
    show_prompts: bool,
    queues: Sequence[str] = (),
) -> None:
    """Serve until stopped. Raises NotServed if it may not be shown there, or the address cannot be had.

    queues: those that /metrics counts.
    """
    writes_json = start_log("dashboard")
    is_local = is_loopback(bind)
    token = check_token(os.environ.get(TOKEN_VARIABLE) or None, bind)
    named = {*hosts} if is_local else {*hosts, socket.gethostname(), socket.getfqdn()}
    connection = Redis.from_url(
        redis_url, socket_timeout=REDIS_TIMEOUT_S, socket_connect_timeout=REDIS_TIMEOUT_S
    )
    dashboard = Dashboard(connection, Options(named, is_local, token, show_prompts, queues))
    listener = listen(bind, port, backlog=128)
    dashboard.recorder.start()
    run_app(
        dashboard.app(), "dashboard", bind, listener, writes_json=writes_json, http=TimedConnection
    )
