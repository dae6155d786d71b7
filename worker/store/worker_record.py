"""How a worker shows itself in Redis."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from redis import Redis

from jobs.common.keys import WORKER_STATS_TTL_S, samples_key, worker_key
from jobs.watch.samples import MAX_POINTS, Point


class WorkerRecord:
    """How the worker shows itself in Redis: RQ's worker hash, our statistics, and their points of an hour."""

    def __init__(
        self,
        client: Redis,
        worker_name: str,
        queue_names: Sequence[str],
        beat: Callable[[Redis, str, str | None], None],
        facts: Mapping[str, Any],
    ) -> None:
        self._client, self._beat = client, beat
        self._key, self._points_key = worker_key(worker_name), samples_key(worker_name)
        self._queue_names = queue_names
        self._facts = {**facts, "queues": list(queue_names), "started_at": time.time()}

    def depth(self) -> dict[str, int]:
        """Jobs that wait in each of the worker's queues; of a key that is no list, 0."""
        with self._client.pipeline(transaction=False) as pipe:
            for name in self._queue_names:
                pipe.llen(f"rq:queue:{name}")
            replies = pipe.execute(raise_on_error=False)
        return {
            name: reply if isinstance(reply, int) else 0
            for name, reply in zip(self._queue_names, replies, strict=True)
        }

    def show(self, state: str, job_id: str | None, counters: Mapping[str, Any], point: Point) -> None:
        """Write heartbeat, state, one running job and the statistics (kept for an hour)."""
        self._beat(self._client, state, job_id)
        stats = {**self._facts, "state": state, **point.to_object(), **counters, "updated_at": point.at}
        self._client.set(self._key, json.dumps(stats), ex=WORKER_STATS_TTL_S)

    def keep(self, point: Point) -> None:
        """Add a point to those of the last hour."""
        with self._client.pipeline(transaction=False) as pipe:
            pipe.lpush(self._points_key, point.to_text())
            pipe.ltrim(self._points_key, 0, MAX_POINTS - 1)
            pipe.expire(self._points_key, WORKER_STATS_TTL_S)
            pipe.execute()
