"""Runner: the interface between the stepper and whatever computes steps."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from engine.checkpoint.adapter_folder import Adapter
from engine.sampling.sampling_batch import SamplingBatch
from engine.schedule.logprobs import RowLogprobs
from engine.schedule.step_batch import StepBatch


@dataclass(frozen=True)
class Sampled:
    """The tokens of the last launched step, on its device. They are valid until the next one is launched.

    token_ids: [rows] int64.  places: [samples] int64, the row of each sample.
    """

    token_ids: Tensor
    places: NDArray[np.int64]


class PendingTokens(ABC):
    """The tokens of a launched step; steps are waited for in the order of their launches.

    After `wait`: logprobs, if any were wanted; pooled: [pooled seqs, modes * hidden] float32, to be added to the
    sequences' vectors.
    """

    logprobs: RowLogprobs | None = None
    pooled: NDArray[np.float32] | None = None

    @abstractmethod
    def wait(self) -> NDArray[np.int64]:
        """Wait for the tokens: [samples] int64. Raises an error of the step on its device."""


class StateRows(NamedTuple):
    """The rows of the pool of states: first those of running sequences, then those of snapshots."""

    num_seqs: int
    num_snapshots: int

    def __str__(self) -> str:
        """Return the numbers in words."""
        return f"states of {self.num_seqs} sequences and {self.num_snapshots} snapshots"


@dataclass(frozen=True)
class PoolSize:
    """The KV pool's blocks, their bytes on each rank, and the longest sequence that model and pool allow.

    states: None if the model keeps none.
    """

    num_blocks: int
    num_bytes: int
    max_model_len: int
    states: StateRows | None = None


class Runner(Protocol):
    """Computes an engine's steps: a ModelRunner, a RankGroup, or a stand-in.

    has_graphs: steps that only decode run from recorded graphs; other steps cost far more.
    """

    @property
    def pool_size(self) -> PoolSize: ...

    @property
    def backend_name(self) -> str: ...

    @property
    def has_graphs(self) -> bool: ...

    def launch(self, step: StepBatch, sampling: SamplingBatch) -> PendingTokens:
        """Start the step, which ends with a token for each row that samples; steps run in the order of launches."""

    def load_adapter(self, number: int, adapter: Adapter) -> None:
        """Load an adapter in place of the one with this number, which later steps give. Raises AdapterRefused."""

    def close(self) -> None:
        """Free the runner's memory. A second call does nothing."""
