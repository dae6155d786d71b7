"""Starts the API server. Without keys it serves this machine only."""

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

#: Connections that wait to be taken. A thousand clients may come at once.
BACKLOG = 2048
#: Seconds for which an idle connection is kept. Clients and proxies close theirs earlier, so that they send nothing
#: into one that is being closed: HTTPX after 5 s, Node after 4 s, ops/deploy/proxy after 15 s.
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
    """Serve until stopped. Raises NotServed if keys are needed and there are none, or the address is not free.

    timeout: seconds that an answer may take. drain: seconds for requests to end after SIGTERM. folder: where files and
    batches lie; None for a server without them.
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
        is_local, prompts_queue, runs_queue, timeout, None if folder is None else _folder(folder)
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


def _folder(name: str) -> Folder:
    """Return the folder of files and batches. Raises NotServed if it cannot be used."""
    try:
        path = run_path(name)
    except JobsError as error:
        raise NotServed(f"--folder: {error}") from None
    if is_stored(path):
        return _stored_folder(path)
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise NotServed(f"--folder {folder} cannot be made: {error.strerror}") from None
    return LocalFolder(folder)


def _stored_folder(path: str) -> Folder:
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
    """Raise NotServed unless there are keys."""
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
