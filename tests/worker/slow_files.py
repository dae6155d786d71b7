"""A worker that closes the files of its shards late: only if it has not signed off meanwhile."""

from __future__ import annotations

import threading

from jobs.parquet.shard_task import ShardTask
from tests.worker.fake_engine import FakeEngine, FakeEngineWorker
from worker.settings import WorkerSettings

LATE_S = 0.5


class LateClosingWorker(FakeEngineWorker):
    """FakeEngineWorker whose shards are closed LATE_S after their end, and never where it did not wait."""

    def load_engine(self, settings: WorkerSettings) -> FakeEngine:
        self._left = threading.Event()
        close = ShardTask.close

        def close_late(task: ShardTask) -> None:
            if not self._left.wait(LATE_S):
                close(task)

        ShardTask.close = close_late  # type: ignore[method-assign]
        return super().load_engine(settings)

    def register_death(self) -> None:
        self._left.set()
        super().register_death()
