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
from engine.attention.spans import Spans, View

MAX_SCORES = 1 << 22  # computed at once where they are written out: 16 MiB


@dataclass(frozen=True)
class TorchMetadata(AttentionMetadata):
    """The step's sequences in row order."""

    spans: Spans


class TorchBackend(KernelBackend):
    """Gathers the blocks that each sequence sees and calls scaled_dot_product_attention on them.

    Soft caps and sinks, which that does not know, are computed step by step in float32.

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
        return TorchMetadata(Spans(block_tables, context_lens, query_lens, starts, self._device))

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


def attend_spans(
    query: Tensor,
    cache: LayerKVCache,
    spans: Spans,
    output: Tensor,
    features: AttentionFeatures,
    sinks: Tensor | None = None,
) -> None:
    """Attend to what each span's rows of the query see of its context; write the same rows of the output."""
    explicit = features.soft_cap is not None or sinks is not None  # what torch's own attention does not know
    for view in spans.views(features, cache.keys.shape[1], always_mask=explicit):
        rows = query[view.start : view.end]
        keys, values = _seen(cache.keys, view), _seen(cache.values, view)
        if explicit:
            attended = _attend_explicitly(rows, keys, values, view.mask, features, sinks)
        else:
            attended = _attend(rows, keys, values, view.mask, features.scale)
        output[view.start : view.end] = attended


def _seen(pool: Tensor, view: View) -> Tensor:
    """Gather the keys or values of a view: pool [blocks, size, kv_heads, dim] -> [kv_heads, seen, dim]."""
    return pool.index_select(0, view.block_ids).flatten(0, 1)[view.first : view.last].transpose(0, 1)


def _attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """query [tokens, heads, dim]; keys, values [kv_heads, seen, dim]; mask as a view has it."""
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


def _attend_explicitly(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    features: AttentionFeatures,
    sinks: Tensor | None,
) -> Tensor:
    """The same in float32 with soft cap and sinks, so many rows at once as keep the scores small."""
    keys, values = keys.float(), values.float()
    rows_at_once = max(1, MAX_SCORES // (query.shape[1] * keys.shape[1]))
    parts = torch.split(query.float(), rows_at_once)
    masks = (None,) * len(parts) if mask is None else torch.split(mask, rows_at_once)
    attended = [
        _attend_rows(part, keys, values, seen, features, sinks)
        for part, seen in zip(parts, masks, strict=True)
    ]
    return torch.cat(attended)


def _attend_rows(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    features: AttentionFeatures,
    sinks: Tensor | None,
) -> Tensor:
    """query [tokens, heads, dim], keys, values [kv_heads, seen, dim], all float32 -> as query."""
    num_tokens, num_heads, head_dim = query.shape
    grouped = query.transpose(0, 1).reshape(len(keys), -1, head_dim)  # a KV head's heads, each with all rows
    scores = (grouped @ keys.transpose(1, 2)).mul_(features.scale).view(num_heads, num_tokens, -1)
    if features.soft_cap is not None:
        scores.div_(features.soft_cap).tanh_().mul_(features.soft_cap)
    if mask is not None:
        scores.masked_fill_(~mask, -torch.inf)
    highest = scores.amax(-1, keepdim=True)
    if sinks is not None:
        highest = highest.maximum(sinks.view(-1, 1, 1))
    weights = scores.sub_(highest).exp_()
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total += (sinks.view(-1, 1, 1) - highest).exp()
    attended = weights.view(len(keys), -1, weights.shape[-1]) @ values
    return (attended.view(num_heads, num_tokens, head_dim) / total).transpose(0, 1)
