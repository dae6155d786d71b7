"""What children do in these tests."""

import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sandbox.child import Worker


def echo(worker: Worker) -> Iterator[tuple[dict[str, Any], bytes]]:
    yield {"pid": os.getpid(), **worker.question}, bytes(worker.body)


def count(worker: Worker) -> Iterator[dict[str, Any]]:
    for number in range(worker.question["to"]):
        yield {"number": number}


def sleep(worker: Worker) -> Iterator[dict[str, Any]]:
    time.sleep(60)
    yield {}


def spin(worker: Worker) -> Iterator[dict[str, Any]]:
    """Hold the interpreter's lock."""
    yield {"number": len(str(10 ** (10**8)))}


def fill(worker: Worker) -> Iterator[dict[str, Any]]:
    yield {"size": len(bytearray(worker.question["bytes"]))}


def die_once(worker: Worker) -> Iterator[dict[str, Any]]:
    """Be killed, the first time that it is asked."""
    mark = Path(worker.question["mark"])
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    yield {"pid": os.getpid()}


def die(worker: Worker) -> Iterator[dict[str, Any]]:
    os.kill(os.getpid(), signal.SIGKILL)
    yield {}


def surroundings(worker: Worker) -> Iterator[dict[str, Any]]:
    yield {
        "environment": sorted(os.environ),
        "files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "cpu_s": resource.getrlimit(resource.RLIMIT_CPU)[0],
        "modules": sorted({name.partition(".")[0] for name in sys.modules}),
    }


def open_files(worker: Worker) -> Iterator[dict[str, Any]]:
    yield {"files": len([socket.socket() for _ in range(1000)])}


def fetch(worker: Worker) -> Iterator[dict[str, Any]]:
    for name in ("a", "b"):
        yield {"found": worker.fetch({"name": name}).decode()}
