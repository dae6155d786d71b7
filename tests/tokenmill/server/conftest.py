"""One Redis, one worker and one server for the tests of a file."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from openai import OpenAI
from redis import Redis

from tests.redis_server import running_redis_server
from tests.rq_workers import Workers, wait_until
from tests.tokenmill.server.server_process import client, running_server


@dataclass(frozen=True)
class Served:
    """What runs: the address, a client, the workers and their Redis, and the folder of files."""

    address: str
    client: OpenAI
    workers: Workers
    redis: Redis
    folder: Path
    log: Path


@pytest.fixture(scope="module")
def served(redis_executable: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with a folder, and a worker whose engine answers `echo:<prompt>`."""
    root = tmp_path_factory.mktemp("server")
    log = root / "server.log"
    with running_redis_server(executable=redis_executable) as url:
        workers = Workers(url, root)
        workers.start(queues=("prompts", "bulk"), TOKENMILL_DATA_ROOTS=str(root))
        folder = root / "api"
        try:
            with running_server(url, log, "--folder", str(folder)) as address:
                api = client(address)
                wait_until(lambda: api.models.list().data)
                yield Served(address, api, workers, workers.redis, folder, log)
        finally:
            workers.close()
