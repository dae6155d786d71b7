"""Starts the dashboard, and refuses to show it to others without a token."""

import os
import re
import socket
from collections.abc import Collection, Mapping, Sequence

from redis import Redis

from tokenmill.dashboard.app import Dashboard, Options
from tokenmill.dashboard.guard import SHARED_LOGIN, TimedConnection
from tokenmill.serving import REDIS_TIMEOUT_S, NotServed, is_loopback, listen, run_app, start_log

#: With which a browser logs in. Asked for wherever it is set.
TOKEN_VARIABLE = "TOKENMILL_DASHBOARD_TOKEN"
#: More of them, each with the name that the log of actions has: `anna=TOKEN,ben=TOKEN`.
TOKENS_VARIABLE = "TOKENMILL_DASHBOARD_TOKENS"
MIN_TOKEN_CHARS = 16


_NAME = re.compile(r"[\w.@-]{1,64}")


def check_tokens(environment: Mapping[str, str], bind: str) -> dict[str, str]:
    """Return the tokens that browsers log in with by the names of their logins; {} for none.

    Raises NotServed if others can reach the address and there is none, or if one cannot be right or can be guessed.
    """
    tokens = {}
    if environment.get(TOKEN_VARIABLE):
        tokens[SHARED_LOGIN] = environment[TOKEN_VARIABLE]
        _check_length(TOKEN_VARIABLE, environment[TOKEN_VARIABLE])
    for entry in filter(None, environment.get(TOKENS_VARIABLE, "").split(",")):
        name, is_there, token = entry.strip().partition("=")
        if not is_there or not _NAME.fullmatch(name) or name in tokens:
            raise NotServed(
                f"{TOKENS_VARIABLE} is not understood at its entry {len(tokens) + 1}: write NAME=TOKEN, separated by "
                "commas, with a name of its own for each, of letters, digits and . @ _ -"
            )
        _check_length(f"{TOKENS_VARIABLE}, {name}:", token)
        tokens[name] = token
    if not tokens and not is_loopback(bind):
        raise NotServed(
            f"{bind} can be reached from other machines: set {TOKEN_VARIABLE}, which browsers log in with, "
            "or leave --bind at 127.0.0.1 and use a tunnel, such as ssh -L 9181:127.0.0.1:9181"
        )
    return tokens


def _check_length(what: str, token: str) -> None:
    if len(token) < MIN_TOKEN_CHARS:
        raise NotServed(
            f"{what} has {len(token)} characters, expected {MIN_TOKEN_CHARS} or more: take the "
            'output of `python -c "import secrets; print(secrets.token_urlsafe())"`'
        )


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
    tokens = check_tokens(os.environ, bind)
    named = {*hosts} if is_local else {*hosts, socket.gethostname(), socket.getfqdn()}
    connection = Redis.from_url(
        redis_url, socket_timeout=REDIS_TIMEOUT_S, socket_connect_timeout=REDIS_TIMEOUT_S
    )
    dashboard = Dashboard(connection, Options(named, is_local, tokens, show_prompts, queues))
    listener = listen(bind, port, backlog=128)
    dashboard.recorder.start()
    run_app(
        dashboard.app(), "dashboard", bind, listener, writes_json=writes_json, http=TimedConnection
    )
