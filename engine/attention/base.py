"""The interface between the model and a backend's kernels, and the inputs of one forward pass."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.attention.adapter_rows import AdapterRows
from engine.attention.decode_state import DecodeState, RowMemory, RowWrites
from engine.attention.features import AttentionFeatures
from engine.attention.kv_cache import LayerKVCache
from engine.attention.layer_kernels import LayerKernels
from engine.attention.prefix_groups import PrefixLimits, PrefixTensors
from engine.attention.state_pool import StateBreak, StateParts
from engine.errors import AttentionRefused
from engine.kernels.upload import Arrays
from engine.sampling.edit_logits import edit_logits
from engine.sampling.logit_edits import LogitEdits
from engine.sampling.sampler import sample
from engine.sampling.sampling_rows import SamplingRows
from engine.sampling.token_scores import TokenScores, score_tokens

Lens = NDArray[np.int64]


class AttentionMetadata:
    """A step's sequences as one backend reads them; each backend has its own subclass."""


class AttentionBreak(AttentionMetadata, ABC):
    """Takes the place of metadata while a step is recorded without its attention, which `attend` then computes."""

    @abstractmethod
    def attend(
        self,
        query: Tensor,
        cache: LayerKVCache,
        features: AttentionFeatures,
        sinks: Tensor | None,
        slopes: Tensor | None,
    ) -> Tensor:
        """Return the attention of a layer, as KernelBackend.forward does."""


class KernelBackend(ABC):
    """One kind of kernels: attention over block tables, a sampler, and perhaps fused layers.

    name: as EngineConfig.attention_backend names it.
    block_multiple: the tokens of a KV block are a multiple of it.
    max_head_dim: the largest head it serves, None if it serves any.
    takes_index: whether it serves layers that attend only to tokens that an index chooses.
    layer_kernels: for norms, rotations and activations, None if those stay in plain torch.
    """

    name: ClassVar[str]
    block_multiple: ClassVar[int] = 1
    max_head_dim: int | None = None
    takes_index: ClassVar[bool] = False
    layer_kernels: LayerKernels | None = None

    @classmethod
    @abstractmethod
    def check(cls, device: torch.device, dtype: torch.dtype) -> None:
        """Raise ConfigError unless the backend serves that device and dtype."""

    @classmethod
    def fp8_problem(cls, device: torch.device) -> str | None:
        """Return why the backend cannot serve an FP8 cache on a device that `check` accepts; None if it can."""
        return None

    @abstractmethod
    def __init__(self, device: torch.device) -> None:
        """device: one that `check` accepts."""

    def prepare(
        self, dtype: torch.dtype, run: Callable[[], Tensor], *, repeats: bool = True
    ) -> Tensor:
        """Compile the kernels of `run` and of the sampler; return the logits that `run` computes.

        repeats: whether `run` may be called more than once.
        """
        return run()

    def check_features(self, features: AttentionFeatures) -> None:
        """Raise AttentionRefused unless the backend can compute attention with these features."""
        if self.max_head_dim is not None and (
            features.head_dim > self.max_head_dim or features.head_dim % 2
        ):
            raise AttentionRefused(
                f"attention_backend={self.name!r} takes heads of an even size up to {self.max_head_dim}, this "
                f"model has {features.head_dim}; use attention_backend='torch'"
            )
        if features.is_indexed and not self.takes_index:
            raise AttentionRefused(
                f"attention_backend={self.name!r} does not attend to tokens that an index chooses, as this model "
                "does; use attention_backend='torch'"
            )

    @abstractmethod
    def build_metadata(
        self,
        block_tables: NDArray[np.int32],
        context_lens: Lens,
        query_lens: Lens,
        beside: Arrays = (),
    ) -> tuple[AttentionMetadata, list[Tensor]]:
        """Prepare one step, once for all layers, and upload the arrays `beside`, in one transfer if it can.

        block_tables: [seqs, max_blocks], valid up to each context.  context_lens: [seqs], tokens each
        sequence has once this step is computed.  query_lens: [seqs], how many of them are in this step.
        """

    def fill_pending(
        self, token_ids: Tensor, rows: Tensor, sampled: Tensor, places: Tensor
    ) -> None:
        """Write sampled[places] to token_ids[rows], with 0 in place of -1.

        token_ids: [tokens].  rows, places: [pending].  sampled: [any].  All are int64.
        """
        token_ids[rows] = sampled[places].clamp_(min=0)

    def store(
        self, keys: Tensor, values: Tensor, cache: LayerKVCache, slot_mapping: Tensor
    ) -> None:
        """Write the step's keys and values to their slots: see LayerKVCache.write."""
        cache.write(keys, values, slot_mapping)

    @abstractmethod
    def forward(
        self,
        query: Tensor,
        cache: LayerKVCache,
        metadata: AttentionMetadata,
        features: AttentionFeatures,
        sinks: Tensor | None = None,
        slopes: Tensor | None = None,
    ) -> Tensor:
        """Compute causal attention of each query over its sequence's cached keys and values.

        query: [tokens, heads, head_dim], sequence after sequence; their keys and values are in the cache already.
        sinks, slopes: [heads] float32, see AttentionFeatures.  Returns [tokens, heads, head_dim].
        """

    def edit(self, logits: Tensor, edits: LogitEdits, sampled: Tensor | None) -> Tensor:
        """Make the edits: see engine/sampling/edit_logits.py."""
        return edit_logits(logits, edits, sampled)

    def sample(self, logits: Tensor, rows: SamplingRows, chosen: Tensor | None = None) -> Tensor:
        """Choose a token for each row, see engine/sampling/sampler.py; into `chosen`, [rows], if given."""
        sampled = sample(logits, rows)
        return sampled if chosen is None else chosen.copy_(sampled)

    def score(self, logits: Tensor, token_ids: Tensor, rows: Tensor) -> TokenScores:
        """Score tokens by the rows of logits that they belong to, see engine/sampling/token_scores.py."""
        return score_tokens(logits, token_ids, rows)


class CapturableBackend(KernelBackend):
    """A backend whose decode step may be recorded as a CUDA graph.

    While a step is recorded, the backend reads no tensor's values on the host and starts kernels on the current
    stream only. Rows with slot -1 and context length 0 are padding: they store and read nothing.
    If `forward` gets an AttentionBreak in place of metadata, it returns what `attend` does.

    prefix_limits: which common prefixes of decoding sequences are read once; None if every sequence reads its own.
    """

    prefix_limits: PrefixLimits | None = None

    def share_prefixes(
        self, layers: Sequence[AttentionFeatures], dtype: torch.dtype, block_size: int
    ) -> None:
        """Set `prefix_limits` for a model's layers and a KV cache of this dtype, if prefixes can be read once."""

    @abstractmethod
    def write_rows(self, memory: RowMemory, writes: RowWrites, sampled: Tensor | None) -> None:
        """Write new rows before a step is replayed.

        sampled: [rows] int64, the tokens that the step before chose; it may lie in `memory`.
        """

    @abstractmethod
    def advance(self, state: DecodeState) -> None:
        """Begin a decode step: make its inputs from the step before."""

    @abstractmethod
    def decode_metadata(
        self,
        rows: Tensor,
        context_lens: Tensor,
        block_tables: Tensor,
        max_context_len: int,
        order: Tensor | None,
        prefixes: PrefixTensors | None = None,
    ) -> AttentionMetadata:
        """Return metadata of decode steps of len(rows) sequences, over tensors that are refilled for each step.

        rows: [seqs] int32, 0, 1, 2, ...  context_lens: [seqs] int32, at most max_context_len.
        block_tables: [seqs, blocks] int32; rows may lie apart.  order: [seqs] int32, the order in which to start.
        prefixes: the prefixes that are read once; given only if `prefix_limits` is set.
        """


@dataclass(frozen=True)
class PictureRows:
    """A step's pictures as a body gets them: arguments, and positions [3, 1, tokens] int64, or None.

    attention: metadata by which the tokens of a picture see each other; None if no picture needs it.
    """

    arguments: dict[str, Any]
    positions: Tensor | None
    attention: AttentionMetadata | None = None


@dataclass(frozen=True)
class ForwardBatch:
    """The tokens of one step on the model's device, sequence after sequence.

    token_ids, positions, slot_mapping: [tokens] int64.  sample_rows: [samples] int64, as in StepBatch.
    states: None if the model keeps no states.  pictures, adapters: None if the step has none.
    """

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    sample_rows: Tensor
    attention: AttentionMetadata
    states: StateParts | StateBreak | None = None
    pictures: PictureRows | None = None
    adapters: AdapterRows | None = None
