"""Real Redis, and `rq worker` in real subprocesses."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis
from rq import Queue
from rq.serializers import JSONSerializer

from tests.forking import ForkedWorkers
from tests.rq_workers import Workers, assert_nothing_held


@pytest.fixture
def workers(redis_url: str, tmp_path: Path) -> Iterator[Workers]:
    running = ForkedWorkers(redis_url, tmp_path)
    running.redis.flushall()
    yield running
    all_left = all(process.poll() == 0 for process in running.processes)
    running.close()
    if running.processes and all_left:
        assert_nothing_held(running.redis)
    running.redis.close()


@pytest.fixture
def bulk(redis: Redis) -> Queue:
    return Queue("bulk", connection=redis, serializer=JSONSerializer)


@pytest.fixture
def new_interpreters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that import everything themselves."""
    monkeypatch.setattr(ForkedWorkers, "run_command", Workers.run_command)
