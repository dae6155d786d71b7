"""The triton backend splits mixed steps rightly, is chosen rightly, and says what it needs."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="triton is not installed, so its kernels cannot run")

from triton.runtime.interpreter import InterpretedFunction

import engine.attention
from engine.attention import load_backend, triton_backend
from engine.attention.features import AttentionFeatures
from engine.attention.kv_cache import LayerKVCache
from engine.attention.triton_backend import TritonBackend
from engine.errors import ConfigError
from engine.kernels.attention.decode import (
    MAX_SPLITS,
    PROGRAMS_PER_PROCESSOR,
    choose_num_programs,
    decode_kernel,
)
from engine.kernels.attention.kv_tile import INTERPRETED
from engine.layers.attention import Attention
from tests.engine.paged import DEVICE, TOLERANCE, PagedBatch, make_batch

ON_CPU = pytest.mark.skipif(not INTERPRETED, reason="about CPUs: here the kernels run on a GPU")


@pytest.fixture(scope="module")
def backend() -> TritonBackend:
    return TritonBackend(DEVICE)


def attend(backend: TritonBackend, batch: PagedBatch) -> torch.Tensor:
    metadata = backend.build_metadata(batch.block_tables, batch.context_lens, batch.query_lens)
    cache = LayerKVCache(batch.key_cache, batch.value_cache)
    return backend.forward(batch.query, cache, metadata, batch.features, batch.sinks)


# a decode, a padding row, a whole prompt, a chunk behind a cached context
decodes = st.integers(1, 300).map(lambda context: (1, context))
padding = st.just((1, 0))
prompts = st.integers(2, 150).map(lambda query: (query, query))
chunks = st.tuples(st.integers(2, 100), st.integers(1, 100)).map(lambda pair: (pair[0], sum(pair)))
sequences = st.lists(st.one_of(decodes, padding, prompts, chunks), min_size=1, max_size=5)


@settings(max_examples=20, deadline=None)
@given(sequences, st.sampled_from([16, 32, 256]), st.sampled_from([(32, 1), (16, 3)]), st.integers(0, 99))
def test_random_steps_equal_float64(
    backend: TritonBackend,
    lens: list[tuple[int, int]],
    block_size: int,
    shape: tuple[int, int],
    seed: int,
) -> None:
    """Any mix of decodes, padding, prompts and chunks in any order."""
    head_dim, group = shape
    batch = make_batch(
        [context for _, context in lens],
        [query for query, _ in lens],
        head_dim=head_dim,
        group=group,
        kv_heads=1,
        block_size=block_size,
        seed=seed,
    )
    assert batch.error(attend(backend, batch)) < TOLERANCE[torch.float32]


features = st.fixed_dictionaries(
    {
        "window": st.none() | st.integers(1, 200),
        "chunk": st.none() | st.integers(1, 200),
        "soft_cap": st.none() | st.sampled_from([0.5, 30.0]),
        "has_sinks": st.booleans(),
    }
)


@settings(max_examples=20, deadline=None)
@given(sequences, features, st.integers(0, 99))
def test_random_steps_with_features_equal_float64(
    backend: TritonBackend, lens: list[tuple[int, int]], features: dict[str, Any], seed: int
) -> None:
    """As above, and what no query sees is NaN."""
    context_lens, query_lens = [context for _, context in lens], [query for query, _ in lens]
    batch = make_batch(context_lens, query_lens, head_dim=16, kv_heads=1, seed=seed, **features)
    assert batch.error(attend(backend, batch)) < TOLERANCE[torch.float32]


def test_one_step_serves_layers_with_different_windows(backend: TritonBackend) -> None:
    """The metadata of a recorded step, too: it is made for the longest contexts, and padding gets zeros."""
    lens = [900, 0, 40, 129, 0]
    whole = make_batch(lens, head_dim=16, kv_heads=1)
    rows, context_lens, tables = (whole.tensor(x) for x in (range(5), lens, whole.block_tables))
    eager = backend.build_metadata(whole.block_tables, whole.context_lens, whole.query_lens)
    recorded = backend.decode_metadata(rows, context_lens, tables, 40_000)
    cache = LayerKVCache(whole.key_cache, whole.value_cache)
    for window in (None, 128, 500, 16):
        batch = replace(whole, window=window)
        for metadata in (eager, recorded):
            out = backend.forward(batch.query, cache, metadata, batch.features)
            assert batch.error(out) < TOLERANCE[torch.float32]
            assert not out[[1, 4]].any()


def test_scratch_memory_is_for_what_a_query_sees(
    backend: TritonBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A window of 128 in a context of 30,000 takes one split, in a recorded step too."""
    batch = make_batch([30_000], head_dim=16, group=1, kv_heads=1)
    rows, lens, tables = (batch.tensor(x) for x in ([0], [30_000], batch.block_tables))
    cache = LayerKVCache(batch.key_cache, batch.value_cache)
    taken: list[int] = []
    place = decode_kernel.arg_names.index("max_splits")
    monkeypatch.setattr(InterpretedFunction, "run", lambda _, *args, **kwargs: taken.append(args[place]))
    for metadata in (
        backend.build_metadata(batch.block_tables, batch.context_lens, batch.query_lens),
        backend.decode_metadata(rows, lens, tables, 40_960),
    ):
        for changes in ({}, {"window": 128}, {"window": 1024}, {"chunk": 600}, {"window": 10**6}):
            backend.forward(batch.query, cache, metadata, replace(batch.features, **changes))
    assert taken == [MAX_SPLITS, 1, 2, 2, MAX_SPLITS] * 2


def test_bits_do_not_depend_on_the_batch_nor_on_being_recorded(backend: TritonBackend) -> None:
    """One long context among short ones; a recorded step of more rows, in an order of its own."""
    whole = make_batch([1500, 20, 700, 0], head_dim=16, kv_heads=1)
    cache = LayerKVCache(whole.key_cache, whole.value_cache)
    alone = replace(
        whole, query=whole.query[:1], block_tables=whole.block_tables[:1],
        context_lens=whole.context_lens[:1], query_lens=whole.query_lens[:1],
    )  # fmt: skip
    rows, lens, tables, order = (
        whole.tensor(x) for x in (range(4), whole.context_lens, whole.block_tables, [0, 2, 1, 3])
    )
    recorded = backend.decode_metadata(rows, lens, tables, 40_960, order)
    together = attend(backend, whole)
    assert torch.equal(attend(backend, alone), together[:1])
    assert torch.equal(backend.forward(whole.query, cache, recorded, whole.features), together)


def test_the_longest_contexts_start_first(backend: TritonBackend) -> None:
    tables = np.arange(8, dtype=np.int32).reshape(4, 2)
    metadata = backend.build_metadata(tables, np.array([5, 9, 30, 9]), np.array([1, 1, 2, 1]))
    assert metadata.decode.rows.tolist() == [1, 4, 0]
    assert metadata.decode.context_lens.tolist() == [9, 9, 5]
    assert metadata.decode.block_tables.tolist() == tables[[1, 3, 0]].tolist()


def test_metadata_splits_a_step_by_kind(backend: TritonBackend) -> None:
    """Sequences of 1, 70, 1 and 3 queries: two decode rows, and tiles of 64 queries for the others."""
    tables = np.arange(12, dtype=np.int32).reshape(4, 3)
    metadata = backend.build_metadata(tables, np.array([5, 80, 9, 3]), np.array([1, 70, 1, 3]))
    decode, prefill = metadata.decode, metadata.prefill
    assert decode.rows.tolist() == [71, 0]
    assert decode.context_lens.tolist() == [9, 5]
    assert decode.block_tables.tolist() == tables[[2, 0]].tolist()
    assert decode.max_context_len == 9
    assert prefill.seqs.tolist() == [0, 0, 1]
    assert prefill.starts.tolist() == [0, 64, 0]
    assert prefill.query_ranges.tolist() == [[1, 71], [72, 75]]
    assert prefill.block_tables.tolist() == tables[[1, 3]].tolist()
    parts = (decode.context_lens, decode.block_tables, prefill.starts, prefill.block_tables)
    assert all(part.data_ptr() % 16 == 0 for part in parts)  # or Triton compiles anew in mid-run


def test_programs_fill_the_device_and_few_are_idle() -> None:
    """However long contexts are: one graph serves all."""
    assert choose_num_programs(8, 132) == MAX_SPLITS
    for num_pairs in (1, 100, 2048, 100_000):
        num_programs = choose_num_programs(num_pairs, 132)
        assert num_programs >= 1
        assert num_pairs * num_programs < PROGRAMS_PER_PROCESSOR * 132 + num_pairs


def test_auto_takes_triton_on_cuda_and_warns(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "engine"):
        assert engine.attention._choose(torch.device("cuda"), torch.bfloat16) == "triton"
    assert "'triton'" in caplog.text
    assert "not been run on a GPU" in caplog.text


def test_auto_takes_torch_where_triton_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine.attention, "find_spec", lambda name: None)
    with caplog.at_level(logging.WARNING, "engine"):
        assert engine.attention._choose(torch.device("cuda"), torch.bfloat16) == "torch"
    assert "'torch'" in caplog.text


def test_auto_does_not_take_it_on_a_cpu(caplog: pytest.LogCaptureFixture) -> None:
    """Also where the interpreter could run the kernels: it is for tests."""
    assert not isinstance(load_backend("auto", torch.device("cpu")), TritonBackend)
    assert caplog.text == ""


def test_without_triton_the_error_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.attention, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install triton"):
        load_backend("triton", torch.device("cpu"))


@ON_CPU
def test_on_a_cpu_without_the_interpreter_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_backend, "INTERPRETED", False)
    with pytest.raises(ConfigError, match=r"does not run on device='cpu'; use 'torch'.*TRITON_INTERPRET"):
        load_backend("triton", torch.device("cpu"))


@pytest.mark.parametrize(("capability", "serves"), [((8, 0), False), ((8, 9), True), ((9, 0), True)])
def test_fp8_is_refused_where_triton_cannot_compile_it(
    capability: tuple[int, int], serves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is loaded: an A100 would raise Triton's own error at the first launch."""
    properties = SimpleNamespace(
        major=capability[0], minor=capability[1], name="a GPU", multi_processor_count=8
    )
    monkeypatch.setattr(triton_backend, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(engine.attention, "find_spec", lambda name: True)
    cuda = torch.device("cuda")
    assert isinstance(load_backend("triton", cuda, torch.bfloat16), TritonBackend)
    if serves:
        load_backend("triton", cuda, torch.bfloat16, 16, "fp8_e4m3")
        return
    with pytest.raises(ConfigError, match=r"kv_cache_dtype='fp8_e4m3': .* 8.9, a GPU has 8.0; use 'torch'"):
        load_backend("auto", cuda, torch.bfloat16, 16, "fp8_e4m3")


def test_heads_that_are_too_large_stop_the_start(backend: TritonBackend) -> None:
    with pytest.raises(ConfigError, match="up to 256 numbers, this model has 320"):
        Attention(backend, AttentionFeatures(2, 2, 320, 1.0))
