"""flash_attn backend: FlashAttention-2's paged calls for attention, Triton's kernels for everything else.

An optional extra for GPUs. Source: https://github.com/Dao-AILab/flash-attention, flash_attn_interface.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.attention.base import AttentionMetadata, Lens
from engine.attention.features import AttentionFeatures
from engine.attention.kv_cache import LayerKVCache
from engine.attention.prefix_groups import PrefixTensors
from engine.attention.triton_backend import TritonBackend
from engine.errors import AttentionRefused, ConfigError
from engine.kernels.attention.decode import DecodeRows
from engine.kernels.upload import Arrays, upload_aligned

DTYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class FlashMetadata(AttentionMetadata):
    """The step's sequences by kind, in row order. prefill_rows: [queries] int32, None if all sequences decode."""

    decode: DecodeRows
    prefill_rows: Tensor | None
    prefill: dict[str, Any]


class FlashAttnBackend(TritonBackend):
    """Computes a step's decodes in one call, which splits their KV, and its prefill chunks in another."""

    name = "flash_attn"
    block_multiple = 256  # flash_attn's paged calls need it

    @classmethod
    def check(cls, device: torch.device, dtype: torch.dtype) -> None:
        if device.type != "cuda":
            problem = f"it does not run on device={device.type!r}; use 'auto' there"
        elif dtype not in DTYPES:
            dtype_name = str(dtype).removeprefix("torch.")
            problem = f"it computes in float16 and bfloat16, not in {dtype_name}; set dtype, or use 'triton'"
        else:
            try:
                import flash_attn  # noqa: F401 - raises ImportError also beside a torch it was not built for
            except ImportError as error:
                problem = f"flash_attn cannot be imported; pip install flash-attn triton, or use 'triton' ({error})"
            else:
                super().check(device, dtype)  # the other layers run Triton's kernels
                return
        raise ConfigError(f"attention_backend='flash_attn' cannot be used: {problem}")

    @classmethod
    def fp8_problem(cls, device: torch.device) -> str | None:
        return "it keeps them in the model's dtype only"

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

        self._attend_decodes = flash_attn_with_kvcache
        self._attend_prefills = flash_attn_varlen_func

    def check_features(self, features: AttentionFeatures) -> None:
        super().check_features(features)
        for what, is_wanted in (
            ("sinks", features.has_sinks),
            ("chunks", features.chunk is not None),
        ):
            if is_wanted:
                raise AttentionRefused(
                    f"attention_backend='flash_attn' knows no attention {what}, which this model has; "
                    "use attention_backend='triton'"
                )

    def share_prefixes(
        self, layers: Sequence[AttentionFeatures], dtype: torch.dtype, block_size: int
    ) -> None:
        """Set no limits: the library reads each sequence's tokens for itself."""

    def build_metadata(
        self,
        block_tables: NDArray[np.int32],
        context_lens: Lens,
        query_lens: Lens,
        beside: Arrays = (),
    ) -> tuple[AttentionMetadata, list[Tensor]]:
        decodes = query_lens == 1
        starts = np.cumsum(query_lens) - query_lens
        queries = query_lens[~decodes]
        contexts = context_lens[~decodes]
        arrays = [
            starts[decodes], context_lens[decodes], block_tables[decodes],
            np.flatnonzero(np.repeat(~decodes, query_lens)),
            np.cumsum(np.append(0, queries)), np.cumsum(np.append(0, contexts)), block_tables[~decodes],
        ]  # fmt: skip
        uploaded = upload_aligned(
            [*(array.astype(np.int32, copy=False) for array in arrays), *beside], self._device
        )
        rows, lens, tables, prefill_rows, query_starts, context_starts, prefill_tables = uploaded[
            : len(arrays)
        ]
        prefill = {
            "cu_seqlens_q": query_starts,
            "cu_seqlens_k": context_starts,
            "max_seqlen_q": int(queries.max(initial=0)),
            "max_seqlen_k": int(contexts.max(initial=0)),
            "block_table": prefill_tables,
        }
        decode = DecodeRows(rows, lens, tables, int(context_lens[decodes].max(initial=0)))
        metadata = FlashMetadata(decode, prefill_rows if len(queries) else None, prefill)
        return metadata, uploaded[len(arrays) :]

    def decode_metadata(
        self,
        rows: Tensor,
        context_lens: Tensor,
        block_tables: Tensor,
        max_context_len: int,
        order: Tensor | None,
        prefixes: PrefixTensors | None = None,
    ) -> AttentionMetadata:
        """Build decode metadata without an order: the library has its own."""
        return FlashMetadata(
            DecodeRows(rows, context_lens, block_tables, max_context_len), None, {}
        )

    def forward(
        self,
        query: Tensor,
        cache: LayerKVCache,
        metadata: AttentionMetadata,
        features: AttentionFeatures,
        sinks: Tensor | None = None,
        slopes: Tensor | None = None,
    ) -> Tensor:
        assert isinstance(metadata, FlashMetadata)
        options = {
            "softmax_scale": features.scale,
            "causal": True,
            # how many tokens before and after its own a query sees; -1: no limit
            "window_size": (-1, -1) if features.window is None else (features.window - 1, 0),
            "softcap": features.soft_cap or 0.0,
            "alibi_slopes": slopes,
        }

        def attend_decodes(rows: Tensor) -> Tensor:
            """Return the attention of rows, [decodes, heads, head_dim], one for each sequence."""
            lens = metadata.decode.context_lens
            tables = metadata.decode.block_tables
            attended: Tensor = self._attend_decodes(
                rows.unsqueeze(1),
                cache.keys,
                cache.values,
                cache_seqlens=lens,
                block_table=tables,
                **options,
            )
            return attended.squeeze(1)

        rows = metadata.prefill_rows
        if rows is None:
            return attend_decodes(query)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        out[rows] = self._attend_prefills(
            query[rows], cache.keys, cache.values, **metadata.prefill, **options
        )
        if len(metadata.decode.rows):
            out[metadata.decode.rows] = attend_decodes(query[metadata.decode.rows])
        return out
