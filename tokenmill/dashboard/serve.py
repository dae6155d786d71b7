"""Starts the dashboard. Without a token it listens only for this machine."""

import os
import re
import socket
from collections.abc import Collection, Mapping, Sequence

from redis import Redis

from tokenmill.dashboard.app import Dashboard, Options
from tokenmill.dashboard.guard import SHARED_LOGIN, TimedConnection
from tokenmill.serving import REDIS_TIMEOUT_S, NotServed, is_loopback, listen, run_app, start_log

#: The variable with the token that browsers log in with. If neither variable is set, there are no logins.
TOKEN_VARIABLE = "TOKENMILL_DASHBOARD_TOKEN"
#: The variable with further tokens, each with a name for the log of actions: `anna=TOKEN,ben=TOKEN`.
TOKENS_VARIABLE = "TOKENMILL_DASHBOARD_TOKENS"
MIN_TOKEN_CHARS = 16


_NAME = re.compile(r"[\w.@-]{1,64}")


def check_tokens(environment: Mapping[str, str], bind: str) -> dict[str, str]:
    """Return the tokens of the environment by the names of their logins; {} if none is set.

    Raises NotServed if a token is malformed or too short, or if there is none and other machines can reach the address.
    bind: the address on which the dashboard is to listen.
    """
    tokens = {}
    shared_token = environment.get(TOKEN_VARIABLE)
    if shared_token:
        tokens[SHARED_LOGIN] = shared_token
        _check_length(TOKEN_VARIABLE, shared_token)
    for entry in environment.get(TOKENS_VARIABLE, "").split(","):
        if not entry:
            continue
        name, equals_sign, token = entry.strip().partition("=")
        if not equals_sign or not _NAME.fullmatch(name) or name in tokens:
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
    """Raise NotServed if a token is so short that it could be guessed. what: its name for the message."""
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
    """Serve until the process is stopped.

    hosts, show_prompts, queues: see Options. Raises NotServed if the address cannot be used, or may not be used without
    a token.
    """
    writes_json = start_log("dashboard")
    is_local = is_loopback(bind)
    tokens = check_tokens(os.environ, bind)
    names = set(hosts)
    if not is_local:
        names |= {socket.gethostname(), socket.getfqdn()}
    connection = Redis.from_url(
        redis_url, socket_timeout=REDIS_TIMEOUT_S, socket_connect_timeout=REDIS_TIMEOUT_S
    )
    options = Options(
        hosts=names, is_local=is_local, tokens=tokens, show_prompts=show_prompts, queues=queues
    )
    dashboard = Dashboard(connection, options)
    listener = listen(bind, port, backlog=128)
    dashboard.recorder.start()
    run_app(
        dashboard.app(), "dashboard", bind, listener, writes_json=writes_json, http=TimedConnection
    )
