"""CPU backend: compiled kernels for decode, torch's own attention for prefills. float32."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.attention.base import AttentionBackend, AttentionMetadata
from engine.attention.kv_cache import LayerKVCache
from engine.attention.layer_kernels import LayerKernels
from engine.attention.torch_backend import SequenceSpan, attend_spans, make_spans
from engine.cpu_kernels.decode_attention import DecodeRows, decode_attention
from engine.cpu_kernels.elementwise import add_rms_norm, norm_and_rotate, silu_and_mul, store_kv
from engine.errors import ConfigError

MAX_HEAD_DIM = 256  # the kernels hold a head in registers


@dataclass(frozen=True)
class CpuMetadata(AttentionMetadata):
    """The step's sequences by kind: those with one new token, and those with more."""

    decode: DecodeRows
    prefills: list[SequenceSpan]


class CpuAttention(AttentionBackend):
    """All decodes of a step in one call, prefill chunks one sequence at a time."""

    name = "cpu"
    max_head_dim = MAX_HEAD_DIM

    def __init__(self, device: torch.device) -> None:
        if device.type != "cpu":
            raise ConfigError(
                f"attention_backend='cpu' does not run on device={device.type!r}; use 'auto' there"
            )
        self._device = device
        self.layer_kernels = LayerKernels(add_rms_norm, norm_and_rotate, silu_and_mul)

    def store(self, keys: Tensor, values: Tensor, cache: LayerKVCache, slot_mapping: Tensor) -> None:
        store_kv(keys, values, cache.keys, cache.values, slot_mapping)

    def build_metadata(
        self,
        block_tables: NDArray[np.int32],
        context_lens: NDArray[np.int64],
        query_lens: NDArray[np.int64],
    ) -> CpuMetadata:
        starts = np.cumsum(query_lens) - query_lens
        decodes = np.flatnonzero(query_lens == 1)
        decodes = decodes[np.argsort(-context_lens[decodes], kind="stable")]
        prefills = np.flatnonzero(query_lens > 1)
        lens = context_lens[decodes]
        return CpuMetadata(
            DecodeRows(
                torch.from_numpy(starts[decodes]),
                torch.from_numpy(lens),
                torch.from_numpy(block_tables[decodes]),
                int(lens.max(initial=0)),
            ),
            make_spans(
                block_tables[prefills],
                context_lens[prefills],
                query_lens[prefills],
                starts[prefills],
                self._device,
            ),
        )

    def forward(
        self, query: Tensor, cache: LayerKVCache, metadata: AttentionMetadata, *, scale: float
    ) -> Tensor:
        assert isinstance(metadata, CpuMetadata)
        out = query.new_empty(query.shape)
        attend_spans(query, cache, metadata.prefills, out, scale=scale)
        decode_attention(query, cache.keys, cache.values, metadata.decode, out, scale=scale)
        return out
