"""A worker whose sampler raises for one seed, as a fault would that a single request brings out."""

from __future__ import annotations

import engine.run.model_runner
from engine.sampling.sampling_batch import SamplingBatch
from worker.batch_worker import BatchWorker
from worker.engine_thread.engine_like import EngineLike
from worker.settings import WorkerSettings

POISON = 666


class PoisonedWorker(BatchWorker):
    """Serves the real engine with that sampler."""

    def load_engine(self, settings: WorkerSettings) -> EngineLike:
        sample = engine.run.model_runner.sample

        def poisoned(
            logits: engine.run.model_runner.Tensor, batch: SamplingBatch
        ) -> engine.run.model_runner.Tensor:
            if POISON in batch.values["seed"]:
                raise OverflowError("a value of one sequence")
            return sample(logits, batch)

        loaded = super().load_engine(settings)
        engine.run.model_runner.sample = poisoned
        return loaded
