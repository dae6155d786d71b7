"""A worker whose sampler raises for one seed, as a fault would that a single request brings out."""

from __future__ import annotations

from torch import Tensor

from engine.attention import KernelBackend
from engine.sampling.sampling_rows import SamplingRows
from worker.batch_worker import BatchWorker
from worker.engine_thread.engine_like import EngineLike
from worker.settings import WorkerSettings

POISON = 666


class PoisonedWorker(BatchWorker):
    """Serves the real engine with that sampler."""

    def load_engine(self, settings: WorkerSettings) -> EngineLike:
        sample = KernelBackend.sample

        def poisoned(backend: KernelBackend, logits: Tensor, rows: SamplingRows) -> Tensor:
            if POISON in rows.seed:
                raise OverflowError("a value of one sequence")
            return sample(backend, logits, rows)

        loaded = super().load_engine(settings)
        KernelBackend.sample = poisoned
        return loaded
