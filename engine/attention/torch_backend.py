"""Reference backend: plain torch, one sequence at a time. Runs on every device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from engine.attention.base import AttentionBackend, AttentionMetadata
from engine.kv_cache import LayerKVCache


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


class TorchAttention(AttentionBackend):
    """Gathers exactly the blocks of each sequence and calls scaled_dot_product_attention on them.

    A gather of the whole batch padded to its longest sequence moves many times the memory (measured 20 to
    30 times slower on a CPU).
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def build_metadata(
        self,
        block_tables: NDArray[np.int32],
        context_lens: NDArray[np.int64],
        query_lens: NDArray[np.int64],
    ) -> TorchMetadata:
        tables = torch.from_numpy(block_tables).to(self._device)
        spans, start = [], 0
        for table, context_len, query_len in zip(
            tables, context_lens.tolist(), query_lens.tolist(), strict=True
        ):
            mask = None
            if 1 < query_len < context_len:
                # query i is token context_len - query_len + i and sees the tokens up to itself
                mask = torch.ones(query_len, context_len, dtype=torch.bool, device=self._device)
                mask = mask.tril(context_len - query_len)
            spans.append(SequenceSpan(start, start + query_len, table, context_len, mask))
            start += query_len
        return TorchMetadata(spans)

    def forward(
        self, query: Tensor, cache: LayerKVCache, metadata: AttentionMetadata, *, scale: float
    ) -> Tensor:
        assert isinstance(metadata, TorchMetadata)
        output = torch.empty_like(query)
        block_size = cache.keys.shape[1]
        for span in metadata.spans:
            block_ids = span.block_ids[: -(-span.context_len // block_size)]
            keys = _context(cache.keys, block_ids, span.context_len)
            values = _context(cache.values, block_ids, span.context_len)
            rows = query[span.start : span.end]
            output[span.start : span.end] = _attend(rows, keys, values, span.mask, scale)
        return output


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
