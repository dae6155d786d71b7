"""The reference backend of attention: plain torch, one sequence at a time, on every device."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from engine.attention.base import AttentionMetadata, KernelBackend, Lens
from engine.attention.features import AttentionFeatures
from engine.attention.kv_cache import LayerKVCache
from engine.kernels.upload import Arrays, upload

# Rows at a time, if they see less than their whole context or scores are written out: more rows would go
# through more tokens that they cannot see, and their scores leave the caches (measured: 2 times slower).
ROWS_AT_ONCE = 128
SCORES_AT_ONCE = 1 << 22  # written out: 16 MiB


@dataclass(frozen=True)
class Span:
    """Rows start:end of a step: the last tokens of a context that lies in these blocks."""

    start: int
    end: int
    block_ids: Tensor
    context_len: int

    def pieces(self, num_rows: int) -> Iterator["Span"]:
        """Cut the rows into spans of at most num_rows."""
        for end in range(self.end, self.start, -num_rows):
            start = max(self.start, end - num_rows)
            context_len = self.context_len - self.end + end
            yield replace(self, start=start, end=end, context_len=context_len)


@dataclass(frozen=True)
class TorchMetadata(AttentionMetadata):
    """The step's sequences in row order.

    chosen: for a layer with an index, the places of the only tokens that each row sees in its sequence, each once:
    [1 or kv_heads, rows, any] integers. A place below 0 or after the query stands for no token.
    """

    spans: list[Span]
    chosen: Tensor | None = None


class TorchBackend(KernelBackend):
    """Gathers the blocks that each sequence sees and calls scaled_dot_product_attention on them.

    That function has no soft caps, sinks and slopes: attention with any of these is computed in float32.
    One gather of the whole batch, padded, was 20 to 30 times slower on a CPU.
    """

    name = "torch"
    takes_index = True

    @classmethod
    def check(cls, device: torch.device, dtype: torch.dtype) -> None:
        """Accept every device and dtype that torch has."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def build_metadata(
        self,
        block_tables: NDArray[np.int32],
        context_lens: Lens,
        query_lens: Lens,
        beside: Arrays = (),
    ) -> tuple[TorchMetadata, list[Tensor]]:
        tables = torch.from_numpy(block_tables).to(self._device)
        ends = np.cumsum(query_lens)
        starts = (ends - query_lens).tolist()
        spans = list(map(Span, starts, ends.tolist(), tables, context_lens.tolist()))
        return TorchMetadata(spans), upload(beside, self._device)

    def forward(
        self,
        query: Tensor,
        cache: LayerKVCache,
        metadata: AttentionMetadata,
        features: AttentionFeatures,
        sinks: Tensor | None = None,
        slopes: Tensor | None = None,
    ) -> Tensor:
        assert isinstance(metadata, TorchMetadata)
        output = torch.empty_like(query)
        explicit = features.soft_cap is not None or sinks is not None or slopes is not None
        attend = partial(_attend_explicitly, sinks=sinks, slopes=slopes) if explicit else _attend
        for span in metadata.spans:
            for piece in _cut(span, features, explicit=explicit or metadata.chosen is not None):
                rows = slice(piece.start, piece.end)
                if metadata.chosen is None:
                    keys, values, mask = _seen(
                        piece, cache, features, query.dtype, always_mask=explicit
                    )
                else:
                    keys, values, mask = _chosen(
                        piece, cache, features, query.dtype, metadata.chosen[:, rows].long()
                    )
                output[rows] = attend(query[rows], keys, values, mask, features)
        return output


def _cut(span: Span, features: AttentionFeatures, *, explicit: bool) -> Iterator[Span]:
    """Cut a span into pieces to compute one at a time. explicit: all scores of a piece are in memory at once."""
    if explicit:
        num_rows = SCORES_AT_ONCE // (features.num_heads * span.context_len)
        return span.pieces(max(1, min(ROWS_AT_ONCE, num_rows)))
    sees_all = _first_seen(span.context_len - 1, features) == 0
    return span.pieces(span.end - span.start if sees_all else ROWS_AT_ONCE)


def _seen(
    span: Span,
    cache: LayerKVCache,
    features: AttentionFeatures,
    dtype: torch.dtype,
    *,
    always_mask: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the keys and values that the rows see, [kv_heads, seen, dim], and a mask [rows, seen] bool if needed."""
    num_rows = span.end - span.start
    end = span.context_len
    block_size = cache.keys.shape[1]
    first = _first_seen(end - num_rows, features)
    skipped = first // block_size
    blocks = span.block_ids[skipped : -(-end // block_size)]
    within = slice(first - skipped * block_size, end - skipped * block_size)
    keys, values = _heads(
        [pool.index_select(0, blocks).flatten(0, 1)[within] for pool in cache[:2]], cache, dtype
    )
    mask = None
    if num_rows > 1 and (always_mask or num_rows < end or _first_seen(end - 1, features)):
        rows = torch.arange(end - num_rows, end, device=keys.device).unsqueeze(1)
        tokens = torch.arange(first, end, device=keys.device)
        mask = tokens <= rows
        if features.window is not None:
            mask &= tokens > rows - features.window
        if features.chunk is not None:
            mask &= tokens >= rows // features.chunk * features.chunk
    return keys, values, mask


def _chosen(
    span: Span, cache: LayerKVCache, features: AttentionFeatures, dtype: torch.dtype, tokens: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `_seen` does, but only of chosen tokens: gathered for one row, masked for several.

    tokens: the span's rows of TorchMetadata.chosen. The mask is [heads or 1, rows, seen].
    """
    end = span.context_len
    block_size = cache.keys.shape[1]
    places = torch.arange(end - (span.end - span.start), end, device=tokens.device)[:, None]
    is_chosen = (tokens >= 0) & (tokens <= places)
    if tokens.shape[:2] == (1, 1):  # one row, with one choice for all heads
        tokens = tokens.flatten().clamp(0, end - 1)
        slots = span.block_ids[tokens // block_size] * block_size + tokens % block_size
        keys, values = _heads([pool.flatten(0, 1)[slots] for pool in cache[:2]], cache, dtype)
        return keys, values, is_chosen
    keys, values, _ = _seen(span, cache, features, dtype, always_mask=False)
    # one column more, cut off below, takes what stands for no token
    mask = torch.zeros(*tokens.shape[:2], end + 1, dtype=torch.bool, device=tokens.device)
    mask.scatter_(-1, torch.where(is_chosen, tokens, end), value=True)
    return keys, values, mask[..., :end].repeat_interleave(features.num_heads // len(tokens), 0)


def _heads(stored: list[Tensor], cache: LayerKVCache, dtype: torch.dtype) -> list[Tensor]:
    """Turn stored keys and values, [tokens, kv_heads, dim], into those of each head, [kv_heads, tokens, dim]."""
    heads = [tensor.transpose(0, 1) for tensor in stored]
    if cache.scales is None:
        return heads
    # in float32, as bfloat16 does not hold every scale
    return [
        (tensor.float() * scales[:, None, None]).to(dtype)
        for tensor, scales in zip(heads, cache.scales, strict=True)
    ]


def _first_seen(token: int, features: AttentionFeatures) -> int:
    """Return the first token of its sequence that this token sees."""
    first = 0 if features.window is None else max(0, token - features.window + 1)
    return first if features.chunk is None else max(first, token // features.chunk * features.chunk)


def _attend(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, features: AttentionFeatures
) -> Tensor:
    """Return the attention of query [tokens, heads, dim] to what `_seen` returns."""
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
    *,
    sinks: Tensor | None,
    slopes: Tensor | None,
) -> Tensor:
    """Return what `_attend` does, with soft cap, sinks and slopes, in float32."""
    num_tokens, num_heads, head_dim = query.shape
    seen = keys.shape[1]
    keys = keys.float()
    values = values.float()
    if sinks is not None:  # sinks are the scores of one more token, which has no value
        keys = F.pad(keys, (0, 0, 0, 1))
        values = F.pad(values, (0, 0, 0, 1))
    grouped = (query.float() * (features.scale / (features.soft_cap or 1.0))).transpose(0, 1)
    products = grouped.reshape(len(keys), -1, head_dim) @ keys.transpose(1, 2)
    scores = products.view(num_heads, num_tokens, -1)
    if features.soft_cap is not None:
        scores.tanh_().mul_(features.soft_cap)
    if slopes is not None:
        tokens = torch.arange(seen, device=scores.device)
        distances = tokens[-num_tokens:, None] - tokens
        scores[..., :seen] -= slopes[:, None, None] * distances
    if mask is not None:
        scores[..., :seen].masked_fill_(~mask, -torch.inf)
    if sinks is not None:
        scores[..., seen] = sinks.unsqueeze(1)
    weights = scores.softmax(-1).view(products.shape)
    return (weights @ values).view(num_heads, num_tokens, head_dim).transpose(0, 1)
