"""The dashboard shows depth, running and failed jobs, hides prompts, and survives a deleted job."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.redis_server import running_redis_server
from tests.rq_workers import ROOT, Workers, wait_until, wait_until_started


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    with running_redis_server() as url:
        running = Workers(url, tmp_path)
        yield running
        running.close()
        running.redis.close()


@pytest.fixture
def dashboard(workers: Workers) -> Iterator[str]:
    """Its address on this machine."""
    with running_dashboard(workers.url) as address:
        yield address


@contextmanager
def running_dashboard(url: str) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "ops.dashboard", "--port", str(port)]
    environment = {**os.environ, "RQ_REDIS_URL": url}
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


def _answers(address: str) -> bool:
    try:
        get(address, "/")
    except urllib.error.URLError:
        return False
    return True


def get(address: str, path: str) -> str:
    with urllib.request.urlopen(address + path, timeout=10) as response:
        return str(response.read().decode())


def get_json(address: str, path: str) -> Any:
    return json.loads(get(address, path))


def test_dashboard_shows_queues_a_running_and_a_failed_job_without_their_prompts(
    workers: Workers, dashboard: str
) -> None:
    running = workers.queue("high").enqueue("jobs.complete", "hang: secret words", max_tokens=3)
    failed = workers.queue("bulk").enqueue("os.getcwd")
    workers.start("--name", "w")
    wait_until_started(running)
    workers.result(failed)
    wait_until(lambda: workers.redis.hget("rq:worker:w", "current_job"))
    late = [workers.queue("late").enqueue("jobs.complete", f"secret words {i}") for i in range(3)]

    queues = {queue["name"]: queue for queue in get_json(dashboard, "/0/data/queues.json")["queues"]}
    assert queues["late"]["count"] == len(late)
    assert queues["high"]["started_job_registry_count"] == 1
    assert queues["bulk"]["failed_job_registry_count"] == 1
    shown = get_json(dashboard, "/0/data/jobs/high/started/8/asc/1.json")["jobs"]
    assert [job["id"] for job in shown] == [running.id]
    shown = get_json(dashboard, "/0/data/jobs/bulk/failed/8/asc/1.json")["jobs"]
    assert "TOKENMILL_ALLOWED_FUNCTIONS" in shown[0]["exc_info"]
    worker = get_json(dashboard, "/0/data/workers.json")["workers"][0]
    assert worker["current_job"]["job_id"] == running.id
    pages = ["/", "/0/view/workers", "/0/view/jobs", "/0/data/workers.json"]
    pages += ["/0/data/jobs/late/queued/8/asc/1.json", "/0/data/jobs/high/started/8/asc/1.json"]
    for page in pages:
        assert "secret" not in get(dashboard, page)


def test_a_worker_whose_current_job_was_deleted_is_shown_as_idle(workers: Workers, dashboard: str) -> None:
    workers.redis.sadd("rq:workers", "rq:worker:w")
    workers.redis.hset("rq:worker:w", mapping={"queues": "high", "state": "busy", "current_job": "gone"})
    worker = get_json(dashboard, "/0/data/workers.json")["workers"][0]
    assert worker["current_job"] == "idle"


@pytest.mark.parametrize("where", ["unix://:pass@word@{path}", "unix://{path}?password=pass@word"])
def test_pages_show_no_password(workers: Workers, where: str) -> None:
    failed = workers.queue("bulk").enqueue("os.getcwd")
    workers.burst()
    workers.redis.config_set("requirepass", "pass@word")
    with running_dashboard(where.format(path=workers.url.removeprefix("unix://"))) as address:
        pages = ["/", "/0/view/workers", "/0/view/jobs", f"/0/view/job/{failed.id}", "/0/data/workers.json"]
        pages += ["/0/data/queues.json", f"/0/data/job/{failed.id}.json"]
        for page in pages:
            assert "word" not in get(address, page).replace("password", "")
