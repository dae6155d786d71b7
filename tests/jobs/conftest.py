from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import click.testing
import pytest
from redis import Redis

from jobs.cli import commands as cli
from jobs.context import JobContext
from tests.jobs.answering import MODEL
from tests.redis_server import running_redis_server

Invoke = Callable[..., click.testing.Result]


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    with running_redis_server() as url:
        yield url


@pytest.fixture
def redis(redis_url: str) -> Iterator[Redis]:
    with Redis.from_url(redis_url) as client:
        client.flushall()
        yield client


@pytest.fixture
def make_context(redis: Redis, tmp_path: Path) -> Callable[[], JobContext]:
    """Contexts of successive executions whose data root is the test's folder."""
    numbers = itertools.count()

    def make() -> JobContext:
        number = next(numbers)
        return JobContext(
            redis, "bulk", f"job-{number}", f"execution{number}", (str(tmp_path.resolve()),), MODEL
        )

    return make


@pytest.fixture
def context(make_context: Callable[[], JobContext]) -> JobContext:
    return make_context()


@pytest.fixture
def invoke(redis: Redis, redis_url: str) -> Invoke:
    def run(*arguments: object) -> click.testing.Result:
        return click.testing.CliRunner().invoke(cli.main, ["--url", redis_url, *map(str, arguments)])

    return run
