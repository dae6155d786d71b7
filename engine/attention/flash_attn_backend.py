"""flash_attn backend: FlashAttention-2's paged calls for attention, Triton's kernels for everything else.

An optional extra for GPUs. Source: https://github.com/Dao-AILab/flash-attention, flash_attn_interface.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.attention.base import AttentionMetadata
from engine.attention.features import AttentionFeatures
from engine.attention.kv_cache import LayerKVCache
from engine.attention.triton_backend import TritonBackend, upload_beside
from engine.errors import ConfigError

DTYPES = (torch.float16, torch.bfloat16)
BLOCK_MULTIPLE = 256  # tokens: its paged calls refuse blocks of any other size


@dataclass(frozen=True)
class FlashDecodes:
    """Sequences with one new token. rows, context_lens: [seqs] int32.  block_tables: [seqs, blocks] int32."""

    rows: Tensor
    context_lens: Tensor
    block_tables: Tensor


@dataclass(frozen=True)
class FlashPrefills:
    """Sequences with more new tokens than one, in row order.

    rows: [queries] int32.  query_starts, context_starts: [seqs + 1] int32, cumulative lengths.
    """

    rows: Tensor
    query_starts: Tensor
    context_starts: Tensor
    block_tables: Tensor
    max_query_len: int
    max_context_len: int


@dataclass(frozen=True)
class FlashMetadata(AttentionMetadata):
    """The step's sequences by kind; the decodes are all of it where `prefills` is None."""

    decodes: FlashDecodes
    prefills: FlashPrefills | None


class FlashAttnBackend(TritonBackend):
    """One call for a step's decodes, which splits their KV, and one for its prefill chunks."""

    name = "flash_attn"

    @classmethod
    def check(cls, device: torch.device, dtype: torch.dtype, block_size: int) -> None:
        if device.type != "cuda":
            problem = f"it does not run on device={device.type!r}; use 'auto' there"
        elif dtype not in DTYPES:
            shown = str(dtype).removeprefix("torch.")
            problem = f"it computes in float16 and bfloat16, not in {shown}; set dtype, or use 'triton'"
        elif block_size % BLOCK_MULTIPLE:
            problem = (
                f"its KV blocks hold a multiple of {BLOCK_MULTIPLE} tokens, not block_size={block_size}; "
                f"set block_size={BLOCK_MULTIPLE}, or use 'triton'"
            )
        elif find_spec("flash_attn") is None:
            problem = "flash_attn cannot be imported; pip install flash-attn triton, or use 'triton'"
        else:
            super().check(device, dtype, block_size)  # the other layers run Triton's kernels
            return
        raise ConfigError(f"attention_backend='flash_attn' cannot be used: {problem}")

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

        self._attend_decodes, self._attend_prefills = flash_attn_with_kvcache, flash_attn_varlen_func

    def refusal(self, features: AttentionFeatures) -> str | None:
        for what, asked in (("sinks", features.has_sinks), ("chunks", features.chunk is not None)):
            if asked:
                return f"knows no attention {what}, which this model has; use attention_backend='triton'"
        return super().refusal(features)

    def build_and_upload(
        self,
        block_tables: NDArray[np.int32],
        context_lens: NDArray[np.int64],
        query_lens: NDArray[np.int64],
        beside: Sequence[NDArray[Any]],
        device: torch.device,
    ) -> tuple[AttentionMetadata, list[Tensor]]:
        starts = np.cumsum(query_lens) - query_lens
        decoding = query_lens == 1
        own, contexts = query_lens[~decoding], context_lens[~decoding]
        arrays = [
            starts[decoding],
            context_lens[decoding],
            block_tables[decoding],
            np.flatnonzero(np.repeat(~decoding, query_lens)),
            np.cumsum(np.append(0, own)),
            np.cumsum(np.append(0, contexts)),
            block_tables[~decoding],
        ]
        uploaded, tensors = upload_beside(arrays, beside, device)
        rows, lens, tables, own_rows, own_starts, context_starts, own_tables = uploaded
        decodes = FlashDecodes(rows, lens, tables)
        if not len(own):
            return FlashMetadata(decodes, None), tensors
        prefills = FlashPrefills(
            own_rows, own_starts, context_starts, own_tables, int(own.max()), int(contexts.max())
        )
        return FlashMetadata(decodes, prefills), tensors

    def decode_metadata(
        self,
        rows: Tensor,
        context_lens: Tensor,
        block_tables: Tensor,
        max_context_len: int,
        order: Tensor | None = None,
    ) -> AttentionMetadata:
        """The library has an order of its own."""
        return FlashMetadata(FlashDecodes(rows, context_lens, block_tables), None)

    def forward(
        self,
        query: Tensor,
        cache: LayerKVCache,
        metadata: AttentionMetadata,
        features: AttentionFeatures,
        sinks: Tensor | None = None,
    ) -> Tensor:
        assert isinstance(metadata, FlashMetadata)
        assert sinks is None  # refused at start
        decodes, prefills = metadata.decodes, metadata.prefills
        if prefills is None:
            return self._decode(query, cache, decodes, features)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        out[prefills.rows] = self._attend_prefills(
            query[prefills.rows],
            cache.keys,
            cache.values,
            cu_seqlens_q=prefills.query_starts,
            cu_seqlens_k=prefills.context_starts,
            max_seqlen_q=prefills.max_query_len,
            max_seqlen_k=prefills.max_context_len,
            block_table=prefills.block_tables,
            **_options(features),
        )
        if len(decodes.rows):
            out[decodes.rows] = self._decode(query[decodes.rows], cache, decodes, features)
        return out

    def _decode(
        self, query: Tensor, cache: LayerKVCache, decodes: FlashDecodes, features: AttentionFeatures
    ) -> Tensor:
        """query: [seqs, heads, head_dim], one row for each sequence. Returns the same shape."""
        attended: Tensor = self._attend_decodes(
            query.unsqueeze(1),
            cache.keys,
            cache.values,
            cache_seqlens=decodes.context_lens,
            block_table=decodes.block_tables,
            **_options(features),
        )
        return attended.squeeze(1)


def _options(features: AttentionFeatures) -> dict[str, Any]:
    """A layer's attention as the library's calls name it."""
    return {
        "softmax_scale": features.scale,
        "causal": True,
        # tokens before and after a query's own that it sees
        "window_size": (-1, -1) if features.window is None else (features.window - 1, 0),
        "softcap": features.soft_cap or 0.0,
    }
