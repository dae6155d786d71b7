from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click.testing
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from redis import Redis
from rq import Queue
from rq.serializers import JSONSerializer

from jobs import cli
from jobs.context import JobContext
from jobs.context.checks import Checks
from tests import slow_files
from tests.forking import ForkedWorkers
from tests.jobs.answering import MODEL
from tests.jobs.checking import DIES, FUNCTION, HANGS, LIMIT_S, NOTHING, RAISES, TELLS
from tests.jobs.local_runs import Runs
from tests.rq_workers import Workers

if TYPE_CHECKING:
    from tests.jobs.s3_server import S3, FaultyProxy

Invoke = Callable[..., click.testing.Result]
MakeContext = Callable[[], JobContext]

slow_files.slow_down()


@pytest.fixture(scope="session", autouse=True)
def _no_wait_for_the_disk() -> Iterator[None]:
    """Processes are killed here, never the machine: what was written is there, synced or not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture
def make_context(redis: Redis, tmp_path: Path) -> MakeContext:
    """Contexts of successive executions whose data root is the test's folder."""
    numbers = itertools.count()

    def make() -> JobContext:
        number = next(numbers)
        return JobContext(
            redis, "bulk", f"job-{number}", f"execution{number}", (str(tmp_path.resolve()),), MODEL
        )

    return make


@pytest.fixture
def context(make_context: MakeContext) -> JobContext:
    return make_context()


@pytest.fixture
def runs(redis: Redis, make_context: MakeContext, tmp_path: Path) -> Runs:
    return Runs(redis, make_context, tmp_path)


@pytest.fixture(scope="module")
def server() -> Iterator[S3]:
    """A store that speaks the protocol of S3."""
    from tests.jobs.s3_server import running_s3

    with running_s3() as s3:
        yield s3


@pytest.fixture
def s3(server: S3, monkeypatch: pytest.MonkeyPatch) -> S3:
    """The store, empty, and named by the environment."""
    from jobs.parquet.files import object_requests
    from tests.jobs.s3_server import use_environment

    use_environment(monkeypatch, server.environment())
    monkeypatch.setattr(object_requests, "FIRST_WAIT_S", 0.02)
    object_requests.opened_store.cache_clear()
    server.empty()
    return server


@pytest.fixture
def proxy(s3: S3, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    """Between the store and whoever goes by the environment."""
    from tests.jobs.s3_server import FaultyProxy, use_environment

    found = FaultyProxy(s3.url)
    use_environment(monkeypatch, s3.environment(found.url))
    yield found
    found.close()


@pytest.fixture(scope="module")
def checks() -> Iterator[Checks]:
    """With the functions of checking.py."""
    found = Checks({FUNCTION, RAISES, HANGS, DIES, TELLS, NOTHING}, LIMIT_S)
    yield found
    found.close()


@pytest.fixture
def checking(context: JobContext, checks: Checks) -> JobContext:
    return replace(context, checks=checks)


@pytest.fixture
def invoke(redis: Redis, redis_url: str) -> Invoke:
    def run(*arguments: object) -> click.testing.Result:
        return click.testing.CliRunner().invoke(
            cli.main, ["--url", redis_url, *map(str, arguments)]
        )

    return run


@pytest.fixture
def workers(redis_url: str, tmp_path: Path) -> Iterator[Workers]:
    started = ForkedWorkers(redis_url, tmp_path)
    yield started
    started.close()


@pytest.fixture
def queue(redis: Redis) -> Queue:
    return Queue("bulk", connection=redis, serializer=JSONSerializer)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Five rows, the last without a prompt."""
    path = tmp_path / "in.parquet"
    pq.write_table(pa.table({"prompt": [*"abcd", None]}), path)
    return path


@pytest.fixture
def three_rows(tmp_path: Path) -> Path:
    """A file with a row group for each row."""
    path = tmp_path / "in.parquet"
    pq.write_table(pa.table({"prompt": ["a", "b", "c"], "id": [1, 2, 3]}), path, row_group_size=1)
    return path
