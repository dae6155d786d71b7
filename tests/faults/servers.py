"""A Redis that keeps what it has acknowledged, and can be killed, frozen and restarted."""

import os
import signal
import subprocess
from pathlib import Path

from tests.redis_server import redis_server_executable, wait_until_ready


class DurableRedis:
    """`appendonly yes`, `appendfsync always`, on a unix socket in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.url = f"unix://{folder / 's'}"
        self._process = self._launch()

    def _launch(self) -> subprocess.Popen[bytes]:
        keep = ["--appendonly", "yes", "--appendfsync", "always", "--save", ""]
        where = ["--port", "0", "--unixsocket", str(self._folder / "s"), "--dir", str(self._folder)]
        process = subprocess.Popen(
            [redis_server_executable(), *where, *keep], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
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
        if self._process.poll() is None:
            self.thaw()
            self.kill()
