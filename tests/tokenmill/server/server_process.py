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


@contextmanager
def running_server(url: str, log: Path, *args: str) -> Iterator[str]:
    """Start `tokenmill serve` on the Redis at url and a free port; yield its address."""
    main = "from jobs.cli import main; main()"
    command = [sys.executable, "-c", main, "serve", "--port", "0", *args]
    environment = {**os.environ, "RQ_REDIS_URL": url, "TOKENMILL_LOG_FORMAT": "text"}
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        wait_until(lambda: process.poll() is not None or _ADDRESS.search(log.read_text()))
        found = _ADDRESS.search(log.read_text())
        assert found is not None, log.read_text()
        yield found[1]
    finally:
        process.terminate()
        process.wait(timeout=10)


def client(address: str, key: str = "none") -> OpenAI:
    """OpenAI's own client. It tries nothing again, so that a test sees each error."""
    return OpenAI(base_url=f"{address}/v1", api_key=key, max_retries=0, timeout=60)
