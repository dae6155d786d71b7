"""The flash_attn backend asks the library for the right thing, and says what it needs before it is taken.

The library runs on GPUs alone. Elsewhere a stand-in takes its place that holds callers to its documented
contract and computes in float64; where there is a GPU and the library, the same steps go through it.
"""

import sys
from dataclasses import replace
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed, and the backend uses its kernels")

from engine.attention import load_backend
from engine.attention.base import AttentionMetadata
from engine.attention.features import AttentionFeatures
from engine.attention.flash_attn_backend import FlashAttnBackend
from engine.attention.kv_cache import LayerKVCache
from engine.errors import ConfigError
from engine.layers.attention import Attention
from tests.engine.paged import DEVICE, TOLERANCE, PagedBatch, attend, make_batch

CUDA = torch.device("cuda")
ON_GPU = torch.cuda.is_available() and find_spec("flash_attn") is not None


def check_pages(cache: Tensor, block_table: Tensor) -> None:
    assert cache.shape[1] % 256 == 0, "page_block_size must be a multiple of 256"
    assert cache.stride(-1) == 1
    assert block_table.dtype == torch.int32
    assert block_table.stride(-1) == 1


def pages(cache: Tensor, table: Tensor, length: int) -> Tensor:
    """Zeros for the blocks that no query sees."""
    return cache[table.long()].flatten(0, 1)[:length].double().nan_to_num()


def named_as_ours(window_size: tuple[int, int], softcap: float) -> dict[str, Any]:
    """A query sees window_size[0] tokens before its own and [1] after it, -1 for all; softcap=0 is none."""
    before, after = window_size
    assert window_size == (-1, -1) or (before >= 0 and after == 0)
    return {"window": None if before < 0 else before + 1, "soft_cap": softcap or None}


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor,
    block_table: Tensor,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
) -> Tensor:
    """q: [batch, 1, heads, head_dim]; a row of no context gives zeros."""
    features = named_as_ours(window_size, softcap)
    check_pages(k_cache, block_table)
    assert causal
    assert cache_seqlens.dtype == torch.int32
    assert q.shape[:2] == (len(block_table), 1) and len(cache_seqlens) == len(q)  # noqa: PT018
    out = torch.zeros_like(q)
    for row, table, length in zip(range(len(q)), block_table, cache_seqlens.tolist(), strict=True):
        if length:
            context = (pages(cache, table, length) for cache in (k_cache, v_cache))
            out[row] = attend(q[row].double(), *context, softmax_scale, **features).to(q.dtype)
    return out


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    block_table: Tensor,
) -> Tensor:
    """q: [tokens, heads, head_dim]; causal mask and window are aligned to the end of each context."""
    features = named_as_ours(window_size, softcap)
    check_pages(k, block_table)
    assert causal
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert len(cu_seqlens_q) == len(cu_seqlens_k) == len(block_table) + 1
    assert cu_seqlens_q[-1] == len(q)
    assert int(cu_seqlens_q.diff().max()) == max_seqlen_q
    assert int(cu_seqlens_k.diff().max()) == max_seqlen_k
    out = torch.empty_like(q)
    for i, table in enumerate(block_table):
        rows = slice(int(cu_seqlens_q[i]), int(cu_seqlens_q[i + 1]))
        context = (pages(cache, table, int(cu_seqlens_k[i + 1] - cu_seqlens_k[i])) for cache in (k, v))
        out[rows] = attend(q[rows].double(), *context, softmax_scale, **features).to(q.dtype)
    return out


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> FlashAttnBackend:
    if not ON_GPU:
        library = ModuleType("flash_attn")
        vars(library).update(
            flash_attn_with_kvcache=flash_attn_with_kvcache, flash_attn_varlen_func=flash_attn_varlen_func
        )
        monkeypatch.setitem(sys.modules, "flash_attn", library)
    return FlashAttnBackend(DEVICE)


def run(backend: FlashAttnBackend, batch: PagedBatch, metadata: AttentionMetadata) -> Tensor:
    cache = LayerKVCache(batch.key_cache, batch.value_cache)
    return backend.forward(batch.query, cache, metadata, batch.features)


decodes = st.integers(1, 600).map(lambda context: (1, context))
prompts = st.integers(2, 300).map(lambda query: (query, query))
chunks = st.tuples(st.integers(2, 40), st.integers(1, 300)).map(lambda pair: (pair[0], sum(pair)))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.one_of(decodes, prompts, chunks), min_size=1, max_size=6), st.integers(0, 99))
def test_random_steps_equal_float64(
    backend: FlashAttnBackend, lens: list[tuple[int, int]], seed: int
) -> None:
    """Any mix of decodes, prompts and chunks in any order."""
    batch = make_batch(
        [context for _, context in lens],
        [query for query, _ in lens],
        block_size=256,
        dtype=torch.bfloat16,
        seed=seed,
    )
    metadata = backend.build_metadata(batch.block_tables, batch.context_lens, batch.query_lens)
    assert batch.error(run(backend, batch, metadata)) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize(("window", "soft_cap"), [(1, None), (100, 1.5), (300, None), (None, 1.5)])
def test_windows_and_soft_caps_are_asked_for(
    backend: FlashAttnBackend, window: int | None, soft_cap: float | None
) -> None:
    """In a step of decodes and chunks; blocks that no query sees are not its own."""
    batch = make_batch(
        [600, 40, 550, 90], [1, 1, 30, 90], block_size=256, dtype=torch.bfloat16, window=window,
        soft_cap=soft_cap,
    )  # fmt: skip
    metadata = backend.build_metadata(batch.block_tables, batch.context_lens, batch.query_lens)
    assert backend.refusal(batch.features) is None
    assert batch.error(run(backend, batch, metadata)) < TOLERANCE[torch.bfloat16]
    plain = backend.forward(
        batch.query, LayerKVCache(batch.key_cache, batch.value_cache), metadata,
        replace(batch.features, window=None, soft_cap=None),
    )  # fmt: skip
    assert batch.error(plain) > TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"has_sinks": True}, "knows no attention sinks, .* use attention_backend='triton'"),
        ({"chunk": 64}, "knows no attention chunks, .* use attention_backend='triton'"),
        ({"head_dim": 320}, "heads of up to 256 numbers, this model has 320; use attention_backend='torch'"),
    ],
)
def test_what_its_calls_do_not_know_is_refused_at_start(
    backend: FlashAttnBackend, changes: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=f"attention_backend='flash_attn' .*{problem}"):
        Attention(backend, replace(AttentionFeatures(2, 2, 64, 1.0), **changes))


@pytest.mark.parametrize(
    ("device", "dtype", "block_size", "problem"),
    [
        (torch.device("cpu"), torch.bfloat16, 256, "does not run on device='cpu'; use 'auto'"),
        (CUDA, torch.float32, 256, "in float16 and bfloat16, not in float32; set dtype"),
        (CUDA, torch.bfloat16, 16, "multiple of 256 tokens, not block_size=16; set block_size=256"),
        pytest.param(
            CUDA, torch.bfloat16, 512, "flash_attn cannot be imported; pip install flash-attn",
            marks=pytest.mark.skipif(find_spec("flash_attn") is not None, reason="flash-attn is installed"),
        ),
    ],
)  # fmt: skip
def test_what_it_needs_is_said_at_start(
    device: torch.device, dtype: torch.dtype, block_size: int, problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        load_backend("flash_attn", device, dtype, block_size)
