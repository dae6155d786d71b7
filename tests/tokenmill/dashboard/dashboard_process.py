"""A real dashboard process, and requests to it."""

import os
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from tests.rq_workers import ROOT, wait_until


@contextmanager
def running_dashboard(url: str, *args: str, **env: str) -> Iterator[str]:
    """Start one on the Redis at url; yield its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    main = "from jobs.cli import main; main()"
    command = [sys.executable, "-c", main, "dashboard", "--port", str(port), *args]
    environment = {**os.environ, "RQ_REDIS_URL": url, **env}
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    address = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: _answers(address))
        yield address
    finally:
        process.terminate()
        process.wait(timeout=10)


@dataclass(frozen=True)
class Answer:
    """A status, the text, and the headers of an answer, their names in lower case."""

    status: int
    text: str
    headers: dict[str, str]


def ask(address: str, path: str, method: str = "GET", **headers: str) -> Answer:
    """Send one request; underscores in the headers' names stand for hyphens."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(address + path, method=method, headers=named)
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return Answer(response.status, response.read().decode(), _lower(response.headers))
    except urllib.error.HTTPError as error:
        with error:
            return Answer(error.code, error.read().decode(), _lower(error.headers))


def _lower(headers: Mapping[str, str]) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}


def get(address: str, path: str) -> str:
    """Return a page. Fails where the dashboard refuses it."""
    answer = ask(address, path)
    assert answer.status == 200, (path, answer)
    return answer.text


def _answers(address: str) -> bool:
    try:
        ask(address, "/")
    except urllib.error.URLError:
        return False
    return True
