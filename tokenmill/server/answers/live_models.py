"""What the living workers of a queue serve, read from Redis at most once a second."""

import asyncio
import time
from collections.abc import Callable, Sequence

from redis import Redis
from starlette.concurrency import run_in_threadpool

from jobs.common.workers import LOADING, RESTORED, RESTORED_TEXT, WorkerSample, read_workers
from tokenmill.server.errors import ApiError

#: How old a look at the workers may be.
LOOK_S = 1.0
#: The most adapters that an error lists.
MAX_LISTED = 20


class LiveModels:
    """The models of one queue's workers."""

    def __init__(
        self, connection: Redis, queue: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._connection = connection
        self._queue = queue
        self._clock = clock
        self._samples: list[WorkerSample] = []
        self._looked_at: float | None = None
        self._looking = asyncio.Lock()

    async def samples(self) -> list[WorkerSample]:
        """Return what each living worker says of itself, also those that load. Raises RedisError."""
        async with self._looking:  # requests that come together await the same look
            now = self._clock()
            if self._looked_at is None or now - self._looked_at >= LOOK_S:
                self._samples = await run_in_threadpool(
                    living_workers, self._connection, self._queue
                )
                self._looked_at = self._clock()
            return self._samples

    async def serving(self) -> list[WorkerSample]:
        """Return the samples of workers that serve a model now."""
        return [sample for sample in await self.samples() if sample.state != LOADING]

    async def check(self, model: str | None) -> None:
        """Raise ApiError unless a living worker serves the model. model: None for any."""
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
        names = {name for sample in serving for name in sample.models}
        if model is not None and model not in names:
            served = ", ".join(_served_by(serving))
            raise ApiError(
                404,
                f"the model {model!r} is not served, but {served}: name one of these",
                code="model_not_found",
                param="model",
            )


def _served_by(samples: Sequence[WorkerSample]) -> list[str]:
    """Return the models of workers, and the first of their adapters."""
    models = sorted({sample.model for sample in samples})
    adapters = sorted({name for sample in samples for name in sample.adapters})
    return [*models, *adapters[:MAX_LISTED]]


def living_workers(connection: Redis, queue: str) -> list[WorkerSample]:
    """Return what each living worker of a queue says of itself, also those that load. Raises RedisError."""
    samples = []
    for worker in read_workers(connection):
        is_here = queue in worker.queues or (
            worker.sample is not None and queue in worker.sample.queues
        )
        if is_here and worker.sample is not None and not worker.is_silent:
            samples.append(worker.sample)
    return samples
