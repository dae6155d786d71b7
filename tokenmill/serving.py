"""What the dashboard and the API server share: their log, where they may listen, and how they are served."""

import logging
import os
import socket
import sys
from ipaddress import ip_address
from typing import Any

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


def listen(bind: str, port: int, backlog: int) -> socket.socket:
    """Listen on an address; port 0 takes a free one. Raises NotServed."""
    family = socket.AF_INET6 if ":" in bind else socket.AF_INET
    try:
        return socket.create_server((bind, port), family=family, backlog=backlog)
    except OSError as error:
        raise NotServed(
            f"{bind} port {port} cannot be listened on ({error.strerror}): use --port"
        ) from error


def run_app(
    app: ASGIApp,
    name: str,
    bind: str,
    listener: socket.socket,
    *,
    writes_json: bool,
    **options: Any,
) -> None:
    """Serve an application until the process is told to stop.

    name: what the first line of the log calls it. options: further ones of uvicorn.Config.
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
        timeout_graceful_shutdown=3,
        **options,
    )
    uvicorn.Server(config).run(sockets=[listener])
