"""Reference backend: plain torch, one sequence at a time. Runs on every device."""

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from engine.attention.base import AttentionMetadata, KernelBackend
from engine.attention.features import AttentionFeatures
from engine.attention.kv_cache import LayerKVCache
from engine.attention.spans import Spans, View


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
        self, block_tables: NDArray[np.int32], context_lens: NDArray[np.int64], query_lens: NDArray[np.int64]
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
    attend = partial(_attend_explicitly, sinks=sinks) if explicit else _attend
    for view in spans.views(features, cache.keys.shape[1], scores_written=explicit):
        rows = query[view.start : view.end]
        key_scales, value_scales = cache.scales or (None, None)
        keys = _seen(cache.keys, view, key_scales, query.dtype)
        values = _seen(cache.values, view, value_scales, query.dtype)
        output[view.start : view.end] = attend(rows, keys, values, view.mask, features)


def _seen(pool: Tensor, view: View, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Gather the keys or values of a view: pool [blocks, size, kv_heads, dim] -> [kv_heads, seen, dim]."""
    seen = pool.index_select(0, view.block_ids).flatten(0, 1)[view.first : view.last].transpose(0, 1)
    return seen if scales is None else seen.to(dtype) * scales.to(dtype)[:, None, None]


def _attend(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, features: AttentionFeatures
) -> Tensor:
    """query [tokens, heads, dim]; keys, values [kv_heads, seen, dim]; mask as a view has it."""
    output = F.scaled_dot_product_attention(
        query.transpose(0, 1).unsqueeze(0),
        keys.unsqueeze(0),
        values.unsqueeze(0),
        attn_mask=mask,
        is_causal=mask is None and query.shape[0] > 1,
        scale=features.scale,
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
    """Attend with soft cap and sinks, in float32."""
    num_tokens, num_heads, head_dim = query.shape
    seen, keys, values = keys.shape[1], keys.float(), values.float()
    if sinks is not None:  # they are the scores of one token more, which has no value
        keys, values = F.pad(keys, (0, 0, 0, 1)), F.pad(values, (0, 0, 0, 1))
    grouped = (query.float() * (features.scale / (features.soft_cap or 1.0))).transpose(0, 1)
    products = grouped.reshape(len(keys), -1, head_dim) @ keys.transpose(1, 2)
    scores = products.view(num_heads, num_tokens, -1)
    if features.soft_cap is not None:
        scores.tanh_().mul_(features.soft_cap)
    if mask is not None:
        scores[..., :seen].masked_fill_(~mask, -torch.inf)
    if sinks is not None:
        scores[..., seen] = sinks.unsqueeze(1)
    weights = scores.softmax(-1).view(products.shape)
    return (weights @ values).view(num_heads, num_tokens, head_dim).transpose(0, 1)
