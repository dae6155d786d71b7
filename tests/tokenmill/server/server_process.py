"""A real server process, and clients of it."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from openai import OpenAI

from tests.rq_workers import ROOT, wait_until

_ADDRESS = re.compile(r"API server on (http://\S+)")


def start_server(
    url: str, log: Path, *args: str, port: int = 0
) -> tuple[subprocess.Popen[bytes], str]:
    """Start `tokenmill serve` on the Redis at url; return the process and its address. port: 0 for a free one."""
    main = "from jobs.cli import main; main()"
    command = [sys.executable, "-c", main, "serve", "--port", str(port), *args]
    environment = {**os.environ, "RQ_REDIS_URL": url, "TOKENMILL_LOG_FORMAT": "text"}
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
    wait_until(lambda: process.poll() is not None or _ADDRESS.search(log.read_text()))
    found = _ADDRESS.search(log.read_text())
    assert found is not None, log.read_text()
    return process, found[1]


@contextmanager
def running_server(url: str, log: Path, *args: str) -> Iterator[str]:
    """Start a server on a free port; yield its address; end it."""
    process, address = start_server(url, log, *args)
    try:
        yield address
    finally:
        process.terminate()
        process.wait(timeout=10)


def client(address: str, key: str = "none") -> OpenAI:
    """OpenAI's own client. It tries nothing again, so that a test sees each error."""
    return OpenAI(base_url=f"{address}/v1", api_key=key, max_retries=0, timeout=60)
