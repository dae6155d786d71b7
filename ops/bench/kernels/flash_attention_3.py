"""Runs FlashAttention 3 on the attention cases of our kernels. This has not run on a GPU yet.

It needs one file of vLLM 0.26's wheel, `vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so`, torch 2.11 for CUDA 13, and a Hopper
GPU. Source: arXiv:2407.08608.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ops.bench.kernels.paged import Paged

NAMESPACE = "_vllm_fa3_C"
NO_LIMIT = -1  # of a window


def load_library(library: Path) -> Callable[..., list[Tensor]]:
    """Load the library and return its attention. Raises OSError if it does not load."""
    torch.ops.load_library(library)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    attention: Callable[..., list[Tensor]] = getattr(torch.ops, NAMESPACE).fwd
    return attention


def bind(attention: Callable[..., list[Tensor]], paged: Paged) -> Callable[[], Tensor]:
    """Return a function that runs the library's attention on these sequences.

    It returns [tokens, heads, head_dim].
    """
    device = paged.query.device
    bounds = np.concatenate(([0], np.cumsum(paged.query_lens)))
    cu_seqlens_q = torch.from_numpy(bounds.astype(np.int32)).to(device)
    context_lens = torch.from_numpy(paged.context_lens.astype(np.int32)).to(device)
    tables = torch.from_numpy(paged.tables).to(device)
    # the operator has no defaults; what these sequences do not use is None
    unused = dict.fromkeys(
        (
            "k_new", "v_new", "q_v", "cu_seqlens_k", "cu_seqlens_k_new", "seqused_q", "kv_batch_idx", "leftpad_k",
            "rotary_cos", "rotary_sin", "seqlens_rotary", "q_descale", "k_descale", "v_descale", "scheduler_metadata",
            "pack_gqa", "s_aux", "cp_tot_seqused_k",
        )
    )  # fmt: skip

    def run() -> Tensor:
        out = torch.empty_like(paged.query)
        attention(
            q=paged.query,
            k=paged.cache.keys,
            v=paged.cache.values,
            out=out,
            cu_seqlens_q=cu_seqlens_q,
            seqused_k=context_lens,
            max_seqlen_q=int(paged.query_lens.max()),
            max_seqlen_k=int(paged.context_lens.max()),
            page_table=tables,
            softmax_scale=paged.features.scale,
            is_causal=True,
            window_size_left=NO_LIMIT,
            window_size_right=NO_LIMIT,
            softcap=0.0,
            is_rotary_interleaved=True,
            num_splits=0,  # the library chooses
            sm_margin=0,
            cp_world_size=1,
            cp_rank=0,
            **unused,
        )
        return out

    return run
