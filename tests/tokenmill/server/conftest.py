"""One Redis, one worker and one server for the tests of a file."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from redis import Redis

from tests.forking import ForkedWorkers
from tests.redis_server import running_redis_server
from tests.rq_workers import ROOT, Workers, wait_until
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
        workers = ForkedWorkers(url, root)
        (root / "adapters").mkdir()
        workers.start(
            queues=("prompts", "bulk"), TOKENMILL_DATA_ROOTS=str(root),
            TOKENMILL_ADAPTERS=str(root / "adapters"),
        )  # fmt: skip
        folder = root / "api"
        try:
            with running_server(url, log, "--folder", str(folder)) as address:
                api = client(address)
                wait_until(lambda: api.models.list().data)
                yield Served(address, api, workers, workers.redis, folder, log)
        finally:
            workers.close()


#: What makes a checkpoint embed, as sentence-transformers writes it.
POOLING = {
    "modules.json": [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {
            "idx": 1,
            "name": "1",
            "path": "1_Pooling",
            "type": "sentence_transformers.models.Pooling",
        },
        {"idx": 2, "name": "2", "path": "2_Norm", "type": "sentence_transformers.models.Normalize"},
    ],
    "1_Pooling/config.json": {"word_embedding_dimension": 128, "pooling_mode_lasttoken": True},
}


class RealModel:
    """Workers with the demo's model, which embeds too, and a client of their server."""

    def __init__(self, workers: Workers, api: OpenAI, folder: Path) -> None:
        self.workers = workers
        self.api = api
        self.folder = folder
        shutil.copytree(ROOT / "ops" / "demo" / "model", folder)
        for name, content in POOLING.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(json.dumps(content))

    def served(self) -> set[bytes]:
        """Return the names of the workers that have begun to serve."""
        return set(self.workers.redis.keys("tokenmill:served:*"))

    def start(self) -> Any:
        return self.workers.start(
            queues=("prompts",),
            worker_class="worker.BatchWorker",
            TOKENMILL_MODEL=str(self.folder),
            TOKENMILL_DEVICE="cpu",
            TOKENMILL_JOURNAL_S="1",
            TOKENMILL_DETERMINISTIC="true",  # otherwise rounding may make two answers differ
            TOKENMILL_MAX_WORKER_DEATHS="1000",
            TOKENMILL_TORCH_THREADS="1",
        )


@pytest.fixture(scope="module")
def model(redis_executable: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealModel]:
    """A server, and a worker with a real engine."""
    root = tmp_path_factory.mktemp("streams")
    with running_redis_server(executable=redis_executable) as url:
        workers = ForkedWorkers(url, root)
        try:
            with running_server(url, root / "server.log") as address:
                served = RealModel(workers, client(address), root / "model")
                served.start()
                wait_until(lambda: served.api.models.list().data)
                yield served
        finally:
            workers.close()
