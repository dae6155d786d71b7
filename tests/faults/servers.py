"""A Redis that keeps what it has acknowledged, and can be killed, frozen and restarted."""

import os
import signal
import subprocess
from contextlib import ExitStack
from pathlib import Path

from tests.redis_server import redis_server_executable, wait_until_ready
from tests.worker.secure_redis import WORKER_PASSWORD, secure_url, tls_before, write_users


class DurableRedis:
    """`appendonly yes`, `appendfsync always`, on a unix socket in `folder`."""

    def __init__(self, folder: Path, is_secure: bool = False) -> None:
        """is_secure: workers come over TLS, as the user of ops/redis-users.acl."""
        self._folder, self._stack = folder, ExitStack()
        self.url = self.worker_url = f"unix://{folder / 's'}"
        self._users = write_users(folder, "on nopass") if is_secure else ""
        self._process = self._launch()
        if is_secure:
            port = self._stack.enter_context(tls_before(folder, folder / "s"))
            self.worker_url = secure_url("worker", WORKER_PASSWORD, port, folder / "ca.pem")

    def _launch(self) -> subprocess.Popen[bytes]:
        keep = ["--appendonly", "yes", "--appendfsync", "always", "--save", ""]
        where = ["--port", "0", "--unixsocket", str(self._folder / "s"), "--dir", str(self._folder)]
        process = subprocess.Popen(
            [redis_server_executable(), *where, *keep, "--aclfile", self._users],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        wait_until_ready(self.url, process)
        return process

    def kill(self) -> None:
        """SIGKILL: connections break, what was acknowledged is on disk."""
        self._process.kill()
        self._process.wait()

    def restart(self) -> None:
        """Start again with what is on disk."""
        self._process = self._launch()

    def freeze(self) -> None:
        """Stop answering, with all connections open."""
        os.kill(self._process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Answer again, also what was sent meanwhile."""
        os.kill(self._process.pid, signal.SIGCONT)

    def close(self) -> None:
        """End the server, whatever state it is in."""
        self._stack.close()
        if self._process.poll() is None:
            self.thaw()
            self.kill()
