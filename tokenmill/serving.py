"""What the dashboard and the API server share: their log, names and addresses, and how they are served."""

import logging
import os
import socket
import sys
from collections.abc import Collection
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from starlette.types import ASGIApp

from jobs.common.plain_log import AUTO, VARIABLE, checked_format, handle_all, is_json

#: Seconds without an answer after which Redis counts as away.
REDIS_TIMEOUT_S = 5.0

logger = logging.getLogger("tokenmill")


class NotServed(Exception):
    """Raised when a server does not start. The message says why, and what to do."""


def start_log(extra: str) -> bool:
    """Write the log as JSON if TOKENMILL_LOG_FORMAT asks for it; return whether it does. Raises NotServed.

    extra: the extra of Tokenmill that installs what JSON needs.
    """
    wanted = os.environ.get(VARIABLE) or AUTO
    try:
        if not is_json(checked_format(wanted), sys.stdout):
            return False
        from jobs.common.json_log import JsonLine
    except ValueError as error:
        raise NotServed(f"{VARIABLE}={wanted!r}: {error}") from None
    except ImportError as error:
        raise NotServed(
            f"{error.name} is not installed: pip install 'tokenmill[{extra}]', or set {VARIABLE}=text"
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


class Hosts:
    """The names under which a server may be asked for.

    A name that its owner points at 127.0.0.1 lets pages in a browser read the answers (DNS rebinding).

    named: `name` or `name:port` of a proxy before it. is_local: it listens on this machine alone, and is
    asked for as localhost or a loopback address, under any port (a tunnel has its own). Else also by any
    address in numbers, which nobody else can point here, and by this machine's names, in `named`.
    """

    def __init__(self, named: Collection[str], *, is_local: bool) -> None:
        self._named = frozenset(name.lower() for name in named)
        self._is_local = is_local

    def allows(self, host: str) -> bool:
        """Whether a request's Host header is one of ours."""
        host = host.lower()
        if self.is_named(host):
            return True
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        if name == "localhost":
            return True
        try:
            address = ip_address(name)
        except ValueError:
            return False
        return address.is_loopback or not self._is_local

    def is_named(self, host: str) -> bool:
        """Whether a Host header is a name of a proxy."""
        return host in self._named or host.rpartition(":")[0] in self._named


def listen(bind: str, port: int, backlog: int) -> socket.socket:
    """Listen on an address; port 0 takes a free one. Raises NotServed."""
    family = socket.AF_INET6 if ":" in bind else socket.AF_INET
    try:
        listener = socket.create_server((bind, port), family=family, backlog=backlog)
    except OSError as error:
        raise NotServed(
            f"{bind} port {port} cannot be listened on ({error.strerror}): use --port"
        ) from error
    # Connections inherit it. Otherwise what follows the head of an answer, such as the next event of a stream, waits
    # 40 ms for the client to acknowledge what came before. asyncio sets it for sockets that it makes itself.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def run_app(
    app: ASGIApp,
    name: str,
    bind: str,
    listener: socket.socket,
    *,
    writes_json: bool,
    drain_s: int = 3,
    **options: Any,
) -> None:
    """Serve an application until the process is told to stop.

    name: what the first line of the log calls it. drain_s: how long requests may go on after that. options: further
    ones of uvicorn.Config.
    """
    shown = f"[{bind}]" if ":" in bind else bind
    address = f"{name} on http://{shown}:{listener.getsockname()[1]}"
    if writes_json:
        logger.info(address)
    else:
        print(address, flush=True)
    config = uvicorn.Config(
        app,
        log_config=None if writes_json else uvicorn.config.LOGGING_CONFIG,
        log_level="warning",
        access_log=False,
        ws="none",
        server_header=False,
        timeout_graceful_shutdown=drain_s,
        **options,
    )
    uvicorn.Server(config).run(sockets=[listener])
