"""How a worker shows itself in Redis."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any

from redis import Redis

from jobs.common.keys import WORKER_STATS_TTL_S, worker_key


class WorkerRecord:
    """How the worker shows itself in Redis: RQ's worker hash, and our statistics."""

    def __init__(
        self,
        client: Redis,
        worker_name: str,
        beat: Callable[[Redis, str, str | None], None],
        facts: Mapping[str, Any],
    ) -> None:
        self._client, self._key, self._beat, self._facts = client, worker_key(worker_name), beat, facts

    def show(self, state: str, job_id: str | None, counters: Mapping[str, Any]) -> None:
        """Write heartbeat, state, one running job and the statistics (kept for an hour)."""
        self._beat(self._client, state, job_id)
        stats = {**self._facts, "state": state, **counters, "updated_at": time.time()}
        self._client.set(self._key, json.dumps(stats), ex=WORKER_STATS_TTL_S)
