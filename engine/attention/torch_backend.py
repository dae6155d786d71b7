"""Reference backend: plain torch, one sequence at a time. Runs on every device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from engine.attention.base import AttentionMetadata, KernelBackend
from engine.attention.features import AttentionFeatures
from engine.attention.kv_cache import LayerKVCache


@dataclass(frozen=True)
class SequenceSpan:
    """One sequence of a step: its rows start:end, its blocks, its context, and the mask if it needs one."""

    start: int
    end: int
    block_ids: Tensor
    context_len: int
    mask: Tensor | None


@dataclass(frozen=True)
class TorchMetadata(AttentionMetadata):
    """The step's sequences in row order."""

    spans: list[SequenceSpan]


class TorchBackend(KernelBackend):
    """Gathers exactly the blocks of each sequence and calls scaled_dot_product_attention on them.

    A gather of the whole batch padded to its longest sequence moves many times the memory (measured 20 to
    30 times slower on a CPU).
    """

    name = "torch"

    @classmethod
    def check(cls, device: torch.device, dtype: torch.dtype, block_size: int) -> None:
        """It serves whatever torch does."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def build_metadata(
        self,
        block_tables: NDArray[np.int32],
        context_lens: NDArray[np.int64],
        query_lens: NDArray[np.int64],
    ) -> TorchMetadata:
        starts = np.cumsum(query_lens) - query_lens
        return TorchMetadata(make_spans(block_tables, context_lens, query_lens, starts, self._device))

    def forward(
        self,
        query: Tensor,
        cache: LayerKVCache,
        metadata: AttentionMetadata,
        features: AttentionFeatures,
        sinks: Tensor | None = None,
    ) -> Tensor:
        assert isinstance(metadata, TorchMetadata)
        output = torch.empty_like(query)
        attend_spans(query, cache, metadata.spans, output, features, sinks)
        return output


def make_spans(
    block_tables: NDArray[np.int32],
    context_lens: NDArray[np.int64],
    query_lens: NDArray[np.int64],
    starts: NDArray[np.int64],
    device: torch.device,
) -> list[SequenceSpan]:
    """One span for each sequence, whose rows begin at `starts`; the rest as in build_metadata."""
    tables = torch.from_numpy(block_tables).to(device)
    spans = []
    for table, context_len, query_len, start in zip(
        tables, context_lens.tolist(), query_lens.tolist(), starts.tolist(), strict=True
    ):
        mask = None
        if 1 < query_len < context_len:
            # query i is token context_len - query_len + i and sees the tokens up to itself
            mask = torch.ones(query_len, context_len, dtype=torch.bool, device=device)
            mask = mask.tril(context_len - query_len)
        spans.append(SequenceSpan(start, start + query_len, table, context_len, mask))
    return spans


def attend_spans(
    query: Tensor,
    cache: LayerKVCache,
    spans: list[SequenceSpan],
    output: Tensor,
    features: AttentionFeatures,
    sinks: Tensor | None = None,
) -> None:
    """Attend to each span's context with its rows of the query; write the same rows of the output."""
    block_size = cache.keys.shape[1]
    for span in spans:
        block_ids = span.block_ids[: -(-span.context_len // block_size)]
        keys = _context(cache.keys, block_ids, span.context_len)
        values = _context(cache.values, block_ids, span.context_len)
        rows = query[span.start : span.end]
        output[span.start : span.end] = _attend(rows, keys, values, span.mask, features.scale)


def _context(pool: Tensor, block_ids: Tensor, context_len: int) -> Tensor:
    """Gather a sequence's keys or values: pool [blocks, size, kv_heads, dim] -> [kv_heads, context, dim]."""
    return pool.index_select(0, block_ids).flatten(0, 1)[:context_len].transpose(0, 1)


def _attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """query [tokens, heads, dim], the end of the context; keys, values [kv_heads, context, dim].

    Without a mask either the one query sees all keys (decode), or queries and keys are the same tokens.
    """
    output = F.scaled_dot_product_attention(
        query.transpose(0, 1).unsqueeze(0),
        keys.unsqueeze(0),
        values.unsqueeze(0),
        attn_mask=mask,
        is_causal=mask is None and query.shape[0] > 1,
        scale=scale,
        enable_gqa=True,
    )
    return output.squeeze(0).transpose(0, 1)
