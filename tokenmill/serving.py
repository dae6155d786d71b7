"""What the dashboard and the API server share: the log, the check of host names, and the way to listen and serve."""

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

#: The seconds without an answer after which a call of Redis fails.
REDIS_TIMEOUT_S = 5.0

logger = logging.getLogger("tokenmill")


class NotServed(Exception):
    """Raised when a server does not start. The message says why, and what to do."""


def start_log(extra: str) -> bool:
    """Write the log as JSON if TOKENMILL_LOG_FORMAT says so, and return whether it does. Raises NotServed.

    extra: the extra of Tokenmill's package that installs what JSON needs, for the message.
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
    """Whether only this machine can reach an address on which a server listens."""
    try:
        return ip_address(bind).is_loopback
    except ValueError:
        return bind == "localhost"


class Hosts:
    """The host names by which requests may call a server.

    If an attacker points a name of his at 127.0.0.1, his pages in a browser could read the answers (DNS rebinding).
    So only these hosts are allowed. Each may have any port, because a tunnel has a port of its own:

    - localhost and loopback addresses,
    - other numeric addresses, if the server is not local: nobody can point a numeric address at another machine,
    - the names in `named`.

    named: the `name` or `name:port` of each proxy, and of this machine unless the server is local.
    is_local: whether the server listens for this machine only.
    """

    def __init__(self, named: Collection[str], *, is_local: bool) -> None:
        self._named = frozenset(name.lower() for name in named)
        self._is_local = is_local

    def allows(self, host: str) -> bool:
        """Whether a request with this Host header is allowed."""
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
        """Whether a host, in lower case, is in `named`, with or without its port."""
        return host in self._named or host.rpartition(":")[0] in self._named


def listen(bind: str, port: int, backlog: int) -> socket.socket:
    """Return a socket that listens on an address. Port 0 takes a free port. Raises NotServed."""
    family = socket.AF_INET6 if ":" in bind else socket.AF_INET
    try:
        listener = socket.create_server((bind, port), family=family, backlog=backlog)
    except OSError as error:
        raise NotServed(
            f"{bind} port {port} cannot be listened on ({error.strerror}): use --port"
        ) from error
    # Connections inherit this option. Without it, what follows the head of a response, such as the next event of a
    # stream, waits 40 ms for the client to acknowledge what came before. asyncio sets the option only for sockets that
    # it makes itself.
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

    name: the application's name in the first line of the log. drain_s: how long requests may go on after the process
    was told to stop. options: further options of uvicorn.Config.
    """
    host = f"[{bind}]" if ":" in bind else bind
    port = listener.getsockname()[1]
    first_line = f"{name} on http://{host}:{port}"
    if writes_json:
        logger.info(first_line)
    else:
        print(first_line, flush=True)
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
