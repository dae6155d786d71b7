"""Runner: the seam between the stepper and whatever computes its steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from engine.run.forward.pending_tokens import PendingTokens
from engine.sampling.sampling_batch import SamplingBatch
from engine.schedule.batch.step_batch import StepBatch


@dataclass(frozen=True)
class PoolSize:
    """Blocks of the KV pool, their bytes on each rank, and the longest sequence model and pool allow."""

    num_blocks: int
    num_bytes: int
    max_model_len: int


class Runner(Protocol):
    """What an engine steps: a ModelRunner, a RankGroup, or what a test or benchmark puts in their place."""

    @property
    def pool_size(self) -> PoolSize:
        """What the runner has room for."""

    @property
    def backend_name(self) -> str:
        """The attention backend that computes."""

    @property
    def has_graphs(self) -> bool:
        """Whether steps that decode alone run from recorded graphs, so that others are dearer by far."""

    def launch(self, step: StepBatch, sampling: SamplingBatch) -> PendingTokens:
        """Start the step, up to a token for each row that samples; steps run in the order of launches."""

    def close(self) -> None:
        """Free what the runner holds. A second call does nothing."""
