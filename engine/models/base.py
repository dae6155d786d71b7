"""CausalModel: the interface through which a step runs a model, native or transformers' own."""

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
    """Where and how a model computes: its ranks, kernels, device and dtype.

    max_positions: the most tokens that a sequence will have.
    """

    tp: TensorParallel
    backend: KernelBackend
    device: torch.device
    dtype: torch.dtype
    max_positions: int


class Kept(NamedTuple):
    """What a model keeps of a sequence.

    layers: the attention layers, for their keys and values. states: of the whole sequence. index_keys: of each token.
    """

    layers: Sequence[AttentionFeatures]
    states: Sequence[StateShape] = ()
    index_keys: Sequence[StateShape] = ()


class CausalModel(nn.Module, ABC):
    """A language model over flat batches and a paged KV cache, or one rank's share of it.

    attention_layers: its attention layers, in the order of the cache's layers.
    layer_numbers: the number of each attention layer among the model's layers, from 0.
    states: what it keeps of a sequence beside keys and values, in the cache's pool of states.
    index_keys: what it keeps of each token to choose the tokens to attend to, in the cache too.
    hidden_size: the width of what `hidden_states` returns.  vocab_size: the width of what `logits` returns on rank 0.
    probe_lengths: the lengths of the two sequences that check the model at start; see engine.run.forward.probe.
    may_wait: `hidden_states` may make the host wait for values, which no graph can record.
    """

    attention_layers: Sequence[AttentionFeatures]
    layer_numbers: Sequence[int]
    states: Sequence[StateShape] = ()
    index_keys: Sequence[StateShape] = ()
    hidden_size: int
    vocab_size: int
    probe_lengths: tuple[int, int] = (13, 9)
    may_wait: ClassVar[bool] = False

    @property
    def can_record_states(self) -> bool:
        """Whether a graph can record `hidden_states` of a model with states.

        It can if the code finds the states in the pool by the tensor StateParts.table, without values on the host.
        """
        return False

    def states_of(self, rows: Tensor, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """Return the final hidden states of `rows`, [rows] int64, in any order.

        The keys and values of all rows of the batch are stored, not only those of `rows`.
        """
        return self.hidden_states(batch, cache)[rows]

    @abstractmethod
    def hidden_states(self, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """Return the final hidden states of all rows, [tokens, hidden], and store their keys and values."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Turn hidden [samples, hidden] into logits [samples, vocabulary].

        Ranks other than 0 return logits of a part of the vocabulary.
        """

    def reference_logits(self, token_ids: Tensor) -> Tensor | None:
        """Compute the logits of one sequence by other code than `hidden_states`, to check it; None without such code.

        token_ids: [tokens]. Returns [tokens, vocabulary], float32. Ranks other than 0 return a part of the vocabulary.
        """
        return None
