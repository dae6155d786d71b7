"""What the flash_attn backend asks of the library, or of a stand-in that computes in float64 where there is no GPU."""

import sys
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed, and the backend uses its kernels")

from engine import Engine, EngineConfig
from engine.attention import load_backend
from engine.attention.features import AttentionFeatures
from engine.attention.flash_attn_backend import FlashAttnBackend
from engine.errors import AttentionRefused, ConfigError
from tests.engine.families import BY_NAME, make_family
from tests.engine.paged import DEVICE, TOLERANCE, attend, attend_by, make_batch

ON_GPU = torch.cuda.is_available() and find_spec("flash_attn") is not None


def with_kvcache(q: Tensor, *caches: Tensor, cache_seqlens: Tensor, **options: Any) -> Tensor:
    """flash_attn_with_kvcache. q: [batch, 1, heads, head_dim]; a row of no context gives zeros."""
    assert q.shape[:2] == (len(cache_seqlens), 1)
    return answer(q.flatten(0, 1), caches, [1] * len(q), cache_seqlens, **options).unsqueeze(1)


def varlen_func(
    q: Tensor, *caches: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    max_seqlen_q: int, max_seqlen_k: int, **options: Any,
) -> Tensor:  # fmt: skip
    """flash_attn_varlen_func. q: [tokens, heads, head_dim]; masks are aligned to the end of each context."""
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert cu_seqlens_q[-1] == len(q)
    queries, contexts = cu_seqlens_q.diff(), cu_seqlens_k.diff()
    assert (int(queries.max()), int(contexts.max())) == (max_seqlen_q, max_seqlen_k)
    return answer(q, caches, queries.tolist(), contexts, **options)


def answer(
    q: Tensor, caches: tuple[Tensor, ...], query_lens: list[int], context_lens: Tensor, *,
    block_table: Tensor, softmax_scale: float, causal: bool, window_size: tuple[int, int], softcap: float,
    alibi_slopes: Tensor | None,
) -> Tensor:  # fmt: skip
    """A query sees window_size[0] tokens before its own and [1] after it, -1 for all; softcap=0 is none."""
    assert causal
    assert caches[0].shape[1] % 256 == 0, "page_block_size must be a multiple of 256"
    assert block_table.dtype == context_lens.dtype == torch.int32
    assert q.stride(-1) == block_table.stride(-1) == 1
    assert len(block_table) == len(query_lens) == len(context_lens)
    assert window_size == (-1, -1) or (window_size[0] >= 0 and window_size[1] == 0)
    kind = {
        "window": window_size[0] + 1 or None,
        "soft_cap": softcap or None,
        "slopes": alibi_slopes,
    }
    out = []
    for rows, table, length in zip(
        q.split(query_lens), block_table.long(), context_lens, strict=True
    ):
        # zeros for the blocks that no query sees
        context = [cache[table].flatten(0, 1)[:length].double().nan_to_num() for cache in caches]
        attended = attend(rows.double(), *context, softmax_scale, **kind) if length else 0 * rows
        out.append(attended.to(q.dtype))
    return torch.cat(out)


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> FlashAttnBackend:
    if not ON_GPU:
        library = ModuleType("flash_attn")
        vars(library).update(
            flash_attn_with_kvcache=with_kvcache, flash_attn_varlen_func=varlen_func
        )
        monkeypatch.setitem(sys.modules, "flash_attn", library)
    return FlashAttnBackend(DEVICE)


decodes = st.integers(0, 600).map(lambda context: (1, context))
prompts = st.integers(2, 300).map(lambda query: (query, query))
chunks = st.tuples(st.integers(2, 40), st.integers(1, 300)).map(lambda pair: (pair[0], sum(pair)))
steps = st.one_of(
    st.lists(decodes, min_size=1), st.lists(st.one_of(decodes, prompts, chunks), min_size=1)
)


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    steps,
    st.sampled_from([None, 1, 100, 300]),
    st.sampled_from([None, 1.5]),
    st.booleans(),
    st.integers(0, 99),
)
def test_random_steps_equal_float64(
    backend: FlashAttnBackend,
    lens: list[tuple[int, int]],
    window: int,
    cap: float,
    sloped: bool,
    seed: int,
) -> None:
    """Decodes, padding, prompts and chunks in any order; decodes alone also as they are recorded."""
    queries, contexts = ([each[side] for each in lens[:6]] for side in (0, 1))
    kind = {
        "block_size": 256,
        "dtype": torch.bfloat16,
        "seed": seed,
        "window": window,
        "soft_cap": cap,
    }
    kind["has_slopes"] = sloped
    batch = make_batch(contexts, queries, **kind)
    assert batch.error(attend_by(backend, batch)) < TOLERANCE[torch.bfloat16]
    if max(queries) == 1:
        arrays = range(len(contexts)), contexts, batch.block_tables
        recorded = backend.decode_metadata(*map(batch.tensor, arrays), 4096, None)
        assert torch.equal(attend_by(backend, batch, recorded), attend_by(backend, batch))


@pytest.mark.parametrize("model_path", ["native", "transformers"])
def test_sinks_chunks_and_other_blocks_are_refused_at_start(
    backend: FlashAttnBackend, model_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FlashAttnBackend, "check", lambda *_: None)  # as where it runs
    folder = str(make_family(tmp_path, BY_NAME["gpt_oss"]))
    config = EngineConfig(folder, "bfloat16", attention_backend="flash_attn", model_path=model_path)
    with pytest.raises(ConfigError, match="of a multiple of 256 tokens, not block_size=16"):
        Engine(config)
    with pytest.raises(
        AttentionRefused, match=r"'flash_attn' knows no attention sinks, .*'triton'"
    ):
        Engine(replace(config, block_size=512))
    with pytest.raises(
        AttentionRefused, match=r"'flash_attn' knows no attention chunks, .*'triton'"
    ):
        backend.check_features(AttentionFeatures(2, 2, 64, 1.0, chunk=64))


@pytest.mark.usefixtures("backend")
def test_what_it_needs_is_said_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(major=9, minor=0, name="a GPU", multi_processor_count=8)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    load = partial(load_backend, "flash_attn", torch.device("cuda"), block_size=256)
    assert isinstance(load(torch.float16), FlashAttnBackend)
    with pytest.raises(ConfigError, match="in float16 and bfloat16, not in float32; set dtype"):
        load(torch.float32)
    with pytest.raises(
        ConfigError, match=r"'flash_attn' cannot keep keys and values in .*='fp8_e4m3'"
    ):
        load(torch.bfloat16, "fp8_e4m3")
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    with pytest.raises(ConfigError, match="flash_attn cannot be imported; pip install flash-attn"):
        load(torch.bfloat16)
