"""A worker whose sampler raises for one seed, as a fault would that a single request brings out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from engine.attention import KernelBackend
from engine.attention.cpu_backend import CpuBackend
from engine.sampling.sampling_rows import SamplingRows
from worker.batch_worker import BatchWorker
from worker.engine_thread.engine_like import EngineLike
from worker.settings import WorkerSettings

POISON = 666
Sample = Callable[[Any, Tensor, SamplingRows, Tensor], Tensor]


class PoisonedWorker(BatchWorker):
    """Serves the real engine with that sampler."""

    def load_engine(self, settings: WorkerSettings) -> EngineLike:
        loaded = super().load_engine(settings)
        CpuBackend.sample = poisoned(CpuBackend.sample)
        KernelBackend.sample = poisoned(KernelBackend.sample)
        return loaded


def poisoned(sample: Sample) -> Sample:
    """It, but for rows of that seed."""

    def raising(backend: Any, logits: Tensor, rows: SamplingRows, chosen: Tensor) -> Tensor:
        if POISON in rows.seed:
            raise OverflowError("a value of one sequence")
        return sample(backend, logits, rows, chosen)

    return raising
