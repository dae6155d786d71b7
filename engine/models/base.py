"""CausalModel: the interface between a step and a model of any make."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from engine.attention.base import ForwardBatch, KernelBackend
from engine.attention.features import AttentionFeatures
from engine.attention.kv_cache import KVCache
from engine.attention.state_pool import StateShape
from engine.layers.parallel import TensorParallel


@dataclass(frozen=True)
class ModelPlace:
    """The device, dtype and kernels of a model. max_positions: tokens that no sequence will exceed."""

    tp: TensorParallel
    backend: KernelBackend
    device: torch.device
    dtype: torch.dtype
    max_positions: int


class Kept(NamedTuple):
    """The tensors that a model keeps of a sequence: keys and values, states, index keys."""

    layers: Sequence[AttentionFeatures]
    states: Sequence[StateShape] = ()
    index_keys: Sequence[StateShape] = ()


class CausalModel(nn.Module, ABC):
    """A language model over flat batches and a paged KV cache, or one rank's share of it.

    attention_layers: its attention layers, in the order that the cache's layers have.
    states: what it keeps of a sequence beside keys and values, in the cache's pool of states.
    index_keys: what it keeps of a token, in the cache too, to choose the tokens that it attends to.
    hidden_size: of what `hidden_states` returns.  vocab_size: of what `logits` returns, on rank 0.
    probe_lengths: tokens of the two sequences by which a start checks it; see engine.run.forward.probe.
    may_wait: `hidden_states` may make the host wait for values, which no graph can record.
    """

    attention_layers: Sequence[AttentionFeatures]
    states: Sequence[StateShape] = ()
    index_keys: Sequence[StateShape] = ()
    hidden_size: int
    vocab_size: int
    probe_lengths: tuple[int, int] = (13, 9)
    may_wait: ClassVar[bool] = False

    @property
    def can_record_states(self) -> bool:
        """Whether `hidden_states` reads and writes states by StateParts.table alone, so that a graph can record it."""
        return False

    def states_of(self, rows: Tensor, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """Return final hidden states of `rows`, [rows] int64, in any order; all keys and values are stored."""
        return self.hidden_states(batch, cache)[rows]

    @abstractmethod
    def hidden_states(self, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """Return final hidden states [tokens, hidden] of all rows; their keys and values are stored."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Turn hidden [samples, hidden] into logits [samples, vocabulary], a part of them on ranks other than 0."""

    def reference_logits(self, token_ids: Tensor) -> Tensor | None:
        """Return logits [tokens, vocabulary], float32, of one sequence by other code than `hidden_states`, or None.

        token_ids: [tokens]. Ranks other than 0 return a part of the vocabulary.
        """
        return None
