"""Knows the models that the living workers of a queue serve. They are read from Redis at most once a second."""

import asyncio
import time
from collections.abc import Callable, Sequence

from redis import Redis
from starlette.concurrency import run_in_threadpool

from jobs.common.workers import LOADING, RESTORED, RESTORED_TEXT, WorkerSample, read_workers
from tokenmill.server.errors import ApiError

#: For how many seconds the workers' samples are cached.
LOOK_S = 1.0
#: The most adapters that an error lists.
MAX_LISTED = 20


class LiveModels:
    """The models of one queue's workers. clock: monotonic seconds."""

    def __init__(
        self, connection: Redis, queue: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._connection = connection
        self._queue = queue
        self._clock = clock
        self._samples: list[WorkerSample] = []
        self._read_at: float | None = None
        self._reading = asyncio.Lock()

    async def samples(self) -> list[WorkerSample]:
        """Return the samples of the queue's living workers, including workers that still load. Raises RedisError."""
        # Requests that come at the same time wait here, and share one reading.
        async with self._reading:
            now = self._clock()
            if self._read_at is None or now - self._read_at >= LOOK_S:
                self._samples = await run_in_threadpool(
                    living_workers, self._connection, self._queue
                )
                self._read_at = self._clock()
            return self._samples

    async def serving(self) -> list[WorkerSample]:
        """Return the samples of the workers that have loaded their model. Raises RedisError."""
        return [sample for sample in await self.samples() if sample.state != LOADING]

    async def check(self, model: str | None) -> None:
        """Raise ApiError unless a living worker serves a model. model: its name; None for any model."""
        serving = await self.serving()
        if any(sample.state == RESTORED for sample in serving):
            raise ApiError(503, RESTORED_TEXT, code="restored")
        if not serving:
            is_loading = bool(await self.samples())
            reason = "its worker loads a model" if is_loading else "no worker is alive"
            raise ApiError(
                503,
                f"queue {self._queue!r} is not served: {reason}; try again, or start `rq worker`",
                code="no_worker",
                headers={"retry-after": "5"},
            )
        if model is None or any(model in sample.models for sample in serving):
            return
        served = ", ".join(_listed_models(serving))
        raise ApiError(
            404,
            f"the model {model!r} is not served; the served models are {served}: name one of these",
            code="model_not_found",
            param="model",
        )


def _listed_models(samples: Sequence[WorkerSample]) -> list[str]:
    """Return the names of the workers' models, and of at most MAX_LISTED adapters, each sorted."""
    models = set()
    adapters: set[str] = set()
    for sample in samples:
        models.add(sample.model)
        adapters.update(sample.adapters)
    return [*sorted(models), *sorted(adapters)[:MAX_LISTED]]


def living_workers(connection: Redis, queue: str) -> list[WorkerSample]:
    """Return the samples of a queue's living workers, including workers that still load. Raises RedisError."""
    samples = []
    for worker in read_workers(connection):
        sample = worker.sample
        if sample is None or worker.is_silent:
            continue
        if queue in worker.queues or queue in sample.queues:
            samples.append(sample)
    return samples
