"""Starts the dashboard, and refuses to show it to others without a token."""

import logging
import os
import socket
import sys
from collections.abc import Collection, Sequence
from ipaddress import ip_address

import uvicorn
from redis import Redis

from jobs.common.plain_log import AUTO, VARIABLE, checked_format, handle_all, is_json
from tokenmill.dashboard.app import Dashboard, Options
from tokenmill.dashboard.guard import TimedConnection

#: With which a browser logs in. Asked for wherever it is set.
TOKEN_VARIABLE = "TOKENMILL_DASHBOARD_TOKEN"
MIN_TOKEN_CHARS = 16

#: Redis is taken for away after so long: the page says so, and goes on asking.
REDIS_TIMEOUT_S = 5.0

logger = logging.getLogger(__name__)


class NotServed(Exception):
    """Why the dashboard does not start, and what to do."""


def check_token(token: str | None, bind: str) -> str | None:
    """Return the token that browsers log in with, None for none.

    Raises NotServed where others can reach the address and there is none, or one that can be guessed.
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


def start_log() -> bool:
    """Let all that is logged be JSON where it shall be; return whether it is. Raises NotServed."""
    wanted = os.environ.get(VARIABLE) or AUTO
    try:
        if not is_json(checked_format(wanted), sys.stdout):
            return False
        from jobs.common.json_log import JsonLine
    except ValueError as error:
        raise NotServed(f"{VARIABLE}={wanted!r}: {error}") from None
    except ImportError as error:
        raise NotServed(
            f"{error.name} is not installed: pip install 'tokenmill[dashboard]', or set {VARIABLE}=text"
        ) from None
    handle_all(JsonLine({}), ("uvicorn", "uvicorn.error"))
    logger.setLevel(logging.INFO)
    return True


def is_loopback(bind: str) -> bool:
    """Whether only this machine reaches what listens there."""
    try:
        return ip_address(bind).is_loopback
    except ValueError:
        return bind == "localhost"


def serve(
    redis_url: str,
    bind: str,
    port: int,
    hosts: Collection[str],
    *,
    show_prompts: bool,
    queues: Sequence[str] = (),
) -> None:
    """Serve until stopped. Raises NotServed where it may not be shown there, or the address cannot be had.

    queues: those that /metrics counts.
    """
    writes_json = start_log()
    token, is_local = check_token(os.environ.get(TOKEN_VARIABLE) or None, bind), is_loopback(bind)
    named = {*hosts} if is_local else {*hosts, socket.gethostname(), socket.getfqdn()}
    connection = Redis.from_url(
        redis_url, socket_timeout=REDIS_TIMEOUT_S, socket_connect_timeout=REDIS_TIMEOUT_S
    )
    app = Dashboard(connection, Options(named, is_local, token, show_prompts, queues)).app()
    family = socket.AF_INET6 if ":" in bind else socket.AF_INET
    try:
        listener = socket.create_server((bind, port), family=family, backlog=128)
    except OSError as error:
        raise NotServed(
            f"{bind} port {port} cannot be listened on ({error.strerror}): use --port"
        ) from error
    shown = f"[{bind}]" if ":" in bind else bind
    address = f"dashboard on http://{shown}:{listener.getsockname()[1]}"
    if writes_json:
        logger.info(address)
    else:
        print(address, flush=True)
    config = uvicorn.Config(
        app,
        log_config=None if writes_json else uvicorn.config.LOGGING_CONFIG,
        log_level="warning",
        access_log=False,
        http=TimedConnection,
        ws="none",
        server_header=False,
        timeout_graceful_shutdown=3,
    )
    uvicorn.Server(config).run(sockets=[listener])
