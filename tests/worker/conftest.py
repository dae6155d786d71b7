"""Real Redis, and `rq worker` in real subprocesses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.redis_server import running_redis_server
from tests.rq_workers import Workers, assert_nothing_held


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    with running_redis_server() as url:
        yield url


@pytest.fixture
def workers(redis_url: str, tmp_path: Path) -> Iterator[Workers]:
    running = Workers(redis_url, tmp_path)
    running.redis.flushall()
    yield running
    all_left = all(process.poll() == 0 for process in running.processes)
    running.close()
    if running.processes and all_left:
        assert_nothing_held(running.redis)
    running.redis.close()
