"""The worker of a fresh interpreter, with leases as short as the harness's."""

from __future__ import annotations

import os
from typing import Any

from jobs.runs.redis_state import state as run_state
from tests.worker.fake_engine import FakeEngineWorker


class FreshWorker(FakeEngineWorker):
    """BatchWorker in all but the model; a planner's lease is as short as a job's."""

    def work(self, *args: Any, **kwargs: Any) -> bool:
        run_state.LOCK_TTL_S = int(os.environ["TOKENMILL_LEASE_S"])
        return super().work(*args, **kwargs)
