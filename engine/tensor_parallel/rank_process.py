"""RankProcess: one rank as the driver sees it, its process and the channel to it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress

from engine.tensor_parallel.channel import Channel

# multiprocessing's spawn would run the caller's main module again in each rank and pickle what it sends
BOOTSTRAP = (
    "import sys; sys.path[:] = sys.argv[4:]; "
    "descriptor, driver_pid, by_main_thread = map(int, sys.argv[1:4]); "
    "from engine.tensor_parallel.lifeline import hold; "
    "hold(descriptor, driver_pid=driver_pid, by_main_thread=bool(by_main_thread)); "
    "from engine.tensor_parallel.rank import main; main(descriptor)"
)
REAP_TIMEOUT_S = 10.0


class RankProcess:
    """Starts one rank. It ends with the driver, on `stop` and `wait`, or on `kill`."""

    def __init__(self, rank: int, timeout_s: float) -> None:
        """timeout_s: how long the rank may leave a message unread."""
        self.rank = rank
        driver_end, rank_end = socket.socketpair()
        by_main_thread = threading.current_thread() is threading.main_thread()
        arguments = map(str, (rank_end.fileno(), os.getpid(), int(by_main_thread), *sys.path))
        with rank_end:
            self._process = subprocess.Popen(
                [sys.executable, "-c", BOOTSTRAP, *arguments],
                pass_fds=[rank_end.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,  # the driver's standard output belongs to the program that uses the engine
                process_group=0,  # a Ctrl-C in the terminal is the driver's alone
            )
        self.channel = Channel(driver_end, timeout_s)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def describe_end(self) -> str:
        """Say how a process ended whose channel has closed."""
        try:
            status = self._process.wait(REAP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return "it closed its channel"
        return (
            f"it was killed by {_signal_name(-status)}" if status < 0 else f"it exited with status {status}"
        )

    def stop(self, message: bytes) -> None:
        """Ask the rank to end, if it still listens."""
        with suppress(OSError):
            self.channel.send(message)

    def wait(self, deadline: float) -> None:
        """Wait for the end until `deadline` (time.monotonic()); kill the rank then."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """End the process, if it still runs, and close the channel to it."""
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(REAP_TIMEOUT_S)
        self.channel.close()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
