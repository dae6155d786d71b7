"""Starts the API server. A server without keys is for this machine only."""

import logging
from pathlib import Path

from redis import Redis
from redis.exceptions import RedisError

from jobs.api_keys import has_keys
from jobs.errors import JobsError
from jobs.runs.plans.paths import is_stored, run_path
from tokenmill.server.app import ApiServer, ServerOptions
from tokenmill.server.batches.folders import Folder, LocalFolder
from tokenmill.server.connections import BoundedConnection
from tokenmill.serving import (
    REDIS_TIMEOUT_S,
    NotServed,
    is_loopback,
    listen,
    logger,
    run_app,
    start_log,
)

#: The most connections that wait to be accepted. A thousand clients may come at once.
BACKLOG = 2048
#: The seconds for which an idle connection is kept open. Clients and proxies close theirs earlier: Node after 4 s,
#: HTTPX after 5 s, ops/deploy/proxy after 15 s. So none sends a request while the server closes the connection.
KEEP_ALIVE_S = 20


def serve(
    redis_url: str,
    bind: str,
    port: int,
    *,
    prompts_queue: str,
    runs_queue: str,
    timeout: int,
    drain: int,
    folder: str | None,
) -> None:
    """Serve until the process is stopped.

    timeout: the most seconds for an answer. drain: the seconds for requests to end after SIGTERM. folder: the folder of
    files and batches; None for a server without them. Raises NotServed if the address or the folder cannot be used, or
    if keys are needed and there are none.
    """
    writes_json = start_log("server")
    if not writes_json:
        logging.basicConfig(format="%(asctime)s %(message)s")
        logger.setLevel(logging.INFO)
    is_local = is_loopback(bind)
    connection = Redis.from_url(
        redis_url, socket_timeout=REDIS_TIMEOUT_S, socket_connect_timeout=REDIS_TIMEOUT_S
    )
    if not is_local:
        _check_keys(connection, bind)
    options = ServerOptions(
        is_local=is_local,
        prompts_queue=prompts_queue,
        runs_queue=runs_queue,
        timeout_s=timeout,
        folder=None if folder is None else _open_folder(folder),
    )
    app = ApiServer(redis_url, connection, options).app()
    listener = listen(bind, port, BACKLOG)
    run_app(
        app,
        "API server",
        bind,
        listener,
        writes_json=writes_json,
        drain_s=drain,
        http=BoundedConnection,
        timeout_keep_alive=KEEP_ALIVE_S,
    )


def _open_folder(name: str) -> Folder:
    """Return the folder of files and batches. Raises NotServed if it cannot be used. name: a path or URL."""
    try:
        path = run_path(name)
    except JobsError as error:
        raise NotServed(f"--folder: {error}") from None
    if is_stored(path):
        return _open_stored_folder(path)
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise NotServed(f"--folder {folder} cannot be made: {error.strerror}") from None
    return LocalFolder(folder)


def _open_stored_folder(path: str) -> Folder:
    """Return a folder in an object store. Raises NotServed if it cannot be used."""
    try:
        from jobs.parquet.files.object_folder import ObjectFolder
    except ImportError:
        raise NotServed(
            f"--folder {path} is in an object store, which needs obstore: pip install obstore"
        ) from None
    try:
        folder = ObjectFolder(path)
        folder.names("")
    except JobsError as error:
        raise NotServed(f"--folder {path} cannot be used: {error}") from None
    return folder


def _check_keys(connection: Redis, bind: str) -> None:
    """Raise NotServed unless Redis has keys. bind: the address, for the message."""
    try:
        if has_keys(connection):
            return
    except RedisError as error:
        raise NotServed(
            f"Redis does not answer ({error}), so it cannot be seen whether there are keys"
        ) from None
    raise NotServed(
        f"{bind} can be reached from other machines, and there are no keys: make one with "
        "`tokenmill keys add PROJECT`, or leave --bind at 127.0.0.1"
    )
