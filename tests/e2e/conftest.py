"""The real product: Redis, `rq worker --worker-class worker.BatchWorker` and the demo model."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.forking import ForkedWorkers
from tests.rq_workers import ROOT, Workers

MODEL = ROOT / "ops" / "demo" / "model"
DATES = ROOT / "ops" / "demo" / "dates.parquet"


class RealWorkers(Workers):
    """Workers that load the demo model; one thread each, as the tests share two cores."""

    worker_class = "worker.BatchWorker"

    def environment(self, **extra: str) -> dict[str, str]:
        return super().environment(
            **{
                "TOKENMILL_MODEL": str(MODEL),
                "TOKENMILL_TORCH_THREADS": "1",
                "TOKENMILL_KV_CACHE_BYTES": str(64 * 2**20),
                "TOKENMILL_DATA_ROOTS": str(self.folder),
                "TOKENMILL_MAX_NUM_SEQS": "64",
                **extra,
            }
        )


class ForkedRealWorkers(ForkedWorkers, RealWorkers):
    """The same, forked from a process that has imported torch."""


@pytest.fixture
def workers(redis_url: str, tmp_path: Path) -> Iterator[RealWorkers]:
    running = ForkedRealWorkers(redis_url, tmp_path)
    running.redis.flushall()
    yield running
    running.close()
    running.redis.close()


@pytest.fixture
def new_interpreters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that import everything themselves."""
    monkeypatch.setattr(ForkedRealWorkers, "run_command", Workers.run_command)
