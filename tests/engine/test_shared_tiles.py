"""Prompts behind a common prefix share tiles of queries, and each query gets what float64 gives it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="triton is not installed, so its kernels cannot run")

from engine import Engine, EngineConfig, SamplingParams
from engine.attention import shared_tiles
from engine.attention.shared_tiles import (
    Prompts,
    SharedTileArrays,
    TileLimits,
    choose_tile_limits,
    cut_queries,
)
from engine.attention.triton_backend import TritonBackend, TritonMetadata
from engine.kernels.attention.kv_tile import INTERPRETED
from engine.kernels.attention.prefill import QUERY_TILE
from engine.kernels.attention.prefix import PREFIX_TILE
from engine.run.forward.warm_up import warm_up_steps
from tests.engine.graphs import SimulatedPieces, simulate_graphs, simulate_mixed_graphs
from tests.engine.paged import BLOCK, DEVICE, TOLERANCE, PagedBatch, attend_by, sharing
from tests.engine.reference import Reference
from tests.engine.test_prefix_attention import count_launches
from tests.examples import examples

ALWAYS = -1e9  # of a launch's time: sharing tiles may make it longer


def sharing_backend(batch: PagedBatch) -> TritonBackend:
    """A backend in which sequences with a prefix in common always share tiles."""
    backend = TritonBackend(DEVICE)
    whole = replace(batch.features, window=None, chunk=None)
    backend.share_prefixes([whole], batch.key_cache.dtype, BLOCK)
    assert backend.tile_limits is not None
    backend.tile_limits = replace(backend.tile_limits, least_spared_share=ALWAYS)
    return backend


def shared_metadata(backend: TritonBackend, batch: PagedBatch) -> TritonMetadata:
    """The batch's metadata, with tiles that sequences share."""
    metadata, _ = backend.build_metadata(batch.block_tables, batch.context_lens, batch.query_lens)
    assert isinstance(metadata, TritonMetadata)
    assert metadata.shared is not None
    return metadata


#: Blocks that each sequence shares, its own tokens, its queries, whose blocks it has, and the tokens shared by tiles
#: of several sequences.
SHAPES = {
    "two tails": ([9, 9], [30, 2], [20, 2], None, {128}),
    "many tails": ([9] * 12, [2, 63, 40, 3, 20, 9, 33, 5, 60, 4, 17, 80], [2, 63, 40, 3, 20, 9, 33, 5, 60, 2, 17, 41],
                   None, {128}),
    "two groups": ([13] * 3 + [5] * 4, [9, 40, 3, 17, 20, 5, 2], [8, 40, 3, 17, 20, 5, 2], [0] * 3 + [3] * 4,
                   {192, 64}),
    "rows outside, and a decode": ([6, 0, 6, 0, 6], [20, 30, 1, 150, 16], [20, 30, 1, 150, 16], None, {64}),
    "queries that also fill tiles": ([9] * 4, [64, 130, 100, 33], [64, 130, 100, 20], None, {128}),
    "prefixes of several lengths": ([14] * 5 + [4, 9], [20, 19, 18, 17, 16, 3, 2], [20, 19, 18, 17, 16, 3, 2], None,
                                    {192}),
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_equal_float64(shape: str) -> None:
    shared, own, queries, firsts, prefixes = SHAPES[shape]
    batch = sharing(shared, own, queries, firsts=firsts, head_dim=32)
    backend = sharing_backend(batch)
    metadata = shared_metadata(backend, batch)
    assert metadata.shared is not None
    num_segments = metadata.shared.first_segments.diff()
    assert set(metadata.shared.num_shared[num_segments > 1].tolist()) == prefixes
    assert batch.error(attend_by(backend, batch, metadata)) < TOLERANCE[torch.float32]


@pytest.mark.parametrize(
    "dtype",
    [pytest.param(torch.float32, marks=pytest.mark.long), torch.float16, torch.bfloat16],
    ids=str,
)
@pytest.mark.parametrize(("head_dim", "group"), [(64, 1), (128, 4), (256, 2), (40, 5)])
def test_heads_of_every_size(head_dim: int, group: int, dtype: torch.dtype) -> None:
    """One head in a program, and two."""
    batch = sharing(
        [9] * 4, [30, 2, 63, 40], [20, 2, 63, 40], head_dim=head_dim, group=group, dtype=dtype
    )
    backend = sharing_backend(batch)
    metadata = shared_metadata(backend, batch)
    assert batch.error(attend_by(backend, batch, metadata)) < TOLERANCE[dtype]


@pytest.mark.parametrize("group", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("features", "kernel"),
    [
        ({"has_sinks": True, "soft_cap": 1.5, "has_slopes": True}, "shared_prefill_kernel"),
        ({"has_sinks": True}, "shared_prefill_kernel"),
        ({"window": 70}, "prefill_kernel"),
        ({"chunk": 64}, "prefill_kernel"),
    ],
    ids=str,
)
def test_layers_of_every_kind(
    features: dict[str, Any],
    kernel: str,
    dtype: torch.dtype,
    group: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One launch in each of a step's layers: those with a window or chunks keep tiles of one sequence."""
    batch = sharing(
        [5] * 4, [30, 20, 2, 20], [20, 20, 2, 15], head_dim=32, group=group, dtype=dtype, **features
    )
    backend = sharing_backend(batch)
    metadata = shared_metadata(backend, batch)
    launches = count_launches(monkeypatch)
    assert batch.error(attend_by(backend, batch, metadata)) < TOLERANCE[dtype]
    if INTERPRETED:
        assert launches == {kernel: 1}


@pytest.mark.parametrize("head_dim", [32, 256])
def test_keys_and_values_of_8_bits(head_dim: int) -> None:
    """Queries that float16 does not hold give the same bits as others, and change nothing for their neighbours."""
    batch = sharing(
        [5] * 4, [30, 5, 2, 20], [20, 5, 2, 15], head_dim=head_dim, dtype=torch.bfloat16
    ).as_fp8()
    assert batch.scales is not None
    keys, values = batch.scales
    backend = sharing_backend(batch)
    metadata = shared_metadata(backend, batch)
    out = attend_by(backend, batch, metadata)
    assert batch.error(out) < TOLERANCE[torch.bfloat16]
    large = replace(batch, query=batch.query * 2.0**40, scales=(keys * 2.0**-40, values))
    assert torch.equal(attend_by(backend, large, metadata), out)
    query = batch.query.clone()
    query[20:25] *= 2.0**60
    with_one_larger = attend_by(backend, replace(batch, query=query), metadata)
    assert torch.equal(with_one_larger[:20], out[:20])
    assert torch.equal(with_one_larger[25:], out[25:])


@pytest.mark.parametrize("wrong", ["one tile more", "the neighbour's table", "one row more"])
def test_wrong_tiles_show(wrong: str) -> None:
    """What the tests above would miss if they could not fail."""
    batch = sharing([9] * 4, [70, 30, 20, 20], [20, 30, 20, 15], head_dim=32)
    backend = sharing_backend(batch)
    metadata = shared_metadata(backend, batch)
    assert metadata.shared is not None
    if wrong == "one tile more":
        metadata.shared.num_shared.add_(PREFIX_TILE)
    elif wrong == "one row more":
        metadata.shared.segments[:, 2].add_(1).clamp_(max=QUERY_TILE)
    else:
        seqs = metadata.shared.segments[:, 0]
        seqs.copy_((seqs + 1) % len(batch.query_lens))
    assert not batch.error(attend_by(backend, batch, metadata)) < 1e-3


LIMITS = TileLimits(
    block_size=BLOCK,
    query_tile=64,
    key_tile=64,
    num_programs=8,
    num_slots=132,
    least_spared_share=1 / 8,
)


def share(
    limits: TileLimits, tables: Any, query_lens: Any, context_lens: Any
) -> SharedTileArrays | None:
    """The tiles of prompts that stand behind each other in a step, which begins with three other rows."""
    starts = 3 + np.cumsum(query_lens) - query_lens
    prompts = Prompts(starts, query_lens, context_lens)
    return limits.share(prompts, cut_queries(query_lens, limits.query_tile), tables)


def prompts_behind(
    blocks: int, tails: list[int], of_prefix: int | None = None, cached: int = 0
) -> tuple[Any, Any, Any]:
    """Block tables, queries and contexts of prompts behind so many common blocks, each with `cached` tokens more.

    of_prefix: how many prompts stand behind each prefix; all unless given.
    """
    tables = np.arange(len(tails) * (blocks + 80), dtype=np.int32).reshape(len(tails), -1)
    size = of_prefix or len(tails)
    for first in range(0, len(tails), size):
        tables[first : first + size, :blocks] = tables[first, :blocks]
    query_lens = np.array(tails)
    return tables, query_lens, blocks * BLOCK + cached + query_lens


@pytest.mark.parametrize(
    ("step", "num_tiles"),
    [
        # 200 tails of 30 behind 896 tokens fill 94 tiles in place of 200
        (prompts_behind(56, [30] * 200), 94),
        # pairs of 30 do with half as many
        (prompts_behind(56, [30] * 200, of_prefix=2), 100),
        # A tail of 2 has a tile of keys to itself: 14 of them have as many behind the prefix as it is long.
        (prompts_behind(56, [2] * 140), 10),
        # the few programs of some tails run side by side anyway, and one of all tails would end later
        (prompts_behind(56, [30] * 4), None),
        # tails that nearly fill tiles spare little
        (prompts_behind(56, [60] * 200), None),
        # behind a short prefix, too
        (prompts_behind(4, [60] * 200), None),
        # more lies behind the prefix than in it
        (prompts_behind(16, [30] * 200, cached=400), None),
        (prompts_behind(56, [64] * 200), None),
        (prompts_behind(0, [30] * 200), None),
        (prompts_behind(56, [30]), None),
    ],
    ids=str,
)  # fmt: skip
def test_tiles_are_shared_where_that_spares_time(step: Any, num_tiles: int | None) -> None:
    arrays = share(LIMITS, *step)
    assert (None if arrays is None else len(arrays.num_shared)) == num_tiles


def test_a_tile_has_no_more_tokens_behind_the_prefix_than_in_it() -> None:
    """Otherwise a program with many short tails would end long after the others."""
    arrays = share(LIMITS, *prompts_behind(56, [2] * 140))
    assert arrays is not None
    assert arrays.count_keys(64).tolist() == [2 * 896] * 10


def test_a_query_alone_in_a_tile_may_see_whole_tiles_of_keys_and_no_more() -> None:
    """The 65th query of a prompt is the 64th token of a tile of keys, beside prompts that share tiles."""
    tables, query_lens, context_lens = prompts_behind(12, [30, 30, 65])
    context_lens[2] = 4 * PREFIX_TILE
    always = replace(LIMITS, least_spared_share=ALWAYS)
    arrays = share(always, tables, query_lens, context_lens)
    assert arrays is not None
    alone = np.flatnonzero((arrays.rows >= 0).sum(axis=1) == 1)
    assert arrays.positions[alone, 0].tolist() == [4 * PREFIX_TILE - 1]
    assert arrays.num_shared[alone].tolist() == [4 * PREFIX_TILE]


def test_models_whose_layers_all_have_windows_share_no_tiles() -> None:
    batch = sharing([9] * 2, [30, 2], [20, 2], head_dim=32)
    window = replace(batch.features, window=64)
    for layers, is_shared in (([window], False), ([window, batch.features], True)):
        limits = choose_tile_limits(layers, BLOCK, query_tile=64, key_tile=64, num_processors=132)
        assert (limits is not None) is is_shared


@pytest.mark.parametrize("num_programs", [2, 4, 8, 32])
@pytest.mark.parametrize("max_num_seqs", [2, 4, 8, 16, 32, 256])
@pytest.mark.parametrize("max_num_batched_tokens", [2048, 8192])
def test_a_start_compiles_the_kernel_if_prompts_may_share_tiles(
    max_num_batched_tokens: int, max_num_seqs: int, num_programs: int
) -> None:
    """Otherwise the first step of such prompts waits for the compiler while the engine serves."""
    limits = replace(LIMITS, num_programs=num_programs)
    config = EngineConfig(
        "any", max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens
    )
    steps = warm_up_steps(config, max_model_len=4096, num_blocks=512)
    is_compiled = any(
        share(limits, step.block_tables, step.query_lens, step.context_lens) is not None
        for step in steps
        if step.query_lens.min() > 1
    )
    may_share = any(
        share(limits, *prompts_behind(192, [length] * max_num_seqs)) is not None
        for length in range(2, max_num_batched_tokens // max_num_seqs, 7)
    )
    assert is_compiled >= may_share


prompt = st.tuples(
    st.integers(0, 2),
    st.sampled_from([0, 4, 9, 14]),
    st.one_of(st.integers(2, 64), st.integers(2, 200)),
    st.integers(0, 250),
)


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(prompt, min_size=2, max_size=20))
def test_each_query_is_in_one_tile_with_what_it_sees(
    prompts: list[tuple[int, int, int, int]],
) -> None:
    """prompts: which prefix, how many of its blocks, queries, and cached tokens of its own before these."""
    width = 14 + 30
    tables = np.arange(len(prompts) * width, dtype=np.int32).reshape(len(prompts), width) + 10_000
    for table, (kind, blocks, *_) in zip(tables, prompts, strict=True):
        table[:blocks] = 100 * kind + np.arange(blocks)
    query_lens = np.array([queries for _, _, queries, _ in prompts])
    cached = np.array([blocks * BLOCK + own for _, blocks, _, own in prompts])
    always = replace(LIMITS, least_spared_share=ALWAYS)
    arrays = share(always, tables, query_lens, cached + query_lens)
    if arrays is None:
        return

    num_tiles = len(arrays.num_shared)
    assert arrays.rows[arrays.rows >= 0].tolist() == sorted(
        set(range(3, 3 + query_lens.sum()))
    ) or (sorted(arrays.rows[arrays.rows >= 0].tolist()) == list(range(3, 3 + query_lens.sum())))
    assert ((arrays.rows >= 0) == (arrays.positions >= 0)).all()
    assert arrays.first_segments[0] == 0
    assert arrays.first_segments[-1] == len(arrays.segments)
    assert (arrays.num_shared % PREFIX_TILE == 0).all()
    starts = 3 + np.cumsum(query_lens) - query_lens
    for tile in range(num_tiles):
        num_shared = arrays.num_shared[tile]
        segments = arrays.segments[arrays.first_segments[tile] : arrays.first_segments[tile + 1]]
        assert len(segments)
        assert (segments[1:, 1] == segments[:-1, 2]).all()
        assert segments[0, 1] == 0
        assert segments[-1, 2] == np.count_nonzero(arrays.rows[tile] >= 0)
        for seq, begin, end in segments:
            rows = arrays.rows[tile, begin:end]
            positions = arrays.positions[tile, begin:end]
            assert (positions == rows - starts[seq] + cached[seq]).all()
            assert (np.diff(positions) == 1).all()
            assert (rows >= starts[seq]).all()
            assert (rows - starts[seq] < query_lens[seq]).all()
            assert num_shared <= positions[0] + 1
            same = (
                tables[seq, : num_shared // BLOCK] == tables[segments[0, 0], : num_shared // BLOCK]
            )
            assert same.all()


PREFIX = [7 * i % 90 + 5 for i in range(9 * BLOCK)]
ENGINE_LIMITS: dict[str, Any] = {
    "dtype": "float32", "kv_cache_bytes": 1 << 21, "max_model_len": 256, "max_num_seqs": 6,
    "max_num_batched_tokens": 256,
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("has_graphs", [True, False])
def test_answers_behind_a_prefix_are_those_of_transformers(
    has_graphs: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of another beginning among them. The rest of such a step may be replayed from graphs."""
    tails = [[100 + i, *range(3, 3 + length)] for i, length in enumerate([3, 20, 41, 70, 9])]
    prompts = [PREFIX + tail for tail in tails] + [[9, 8, 7] * 10]
    reference = Reference(folder, prompts, num_new_tokens=3)
    monkeypatch.setattr(shared_tiles, "LEAST_SPARED_SHARE", ALWAYS)
    pieces = SimulatedPieces()
    if has_graphs:
        simulate_graphs(monkeypatch)
        pieces = simulate_mixed_graphs(monkeypatch)
    launches = count_launches(monkeypatch)
    params = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
    config = EngineConfig(str(folder), attention_backend="triton", **ENGINE_LIMITS)
    with Engine(config) as engine:
        engine.generate([[*PREFIX, 1]], params)  # the others find its blocks
        launches.clear()
        pieces.replayed.clear()
        completions = engine.generate(prompts, params)
    assert launches["shared_prefill_kernel"] > 0
    assert bool(pieces.replayed) is has_graphs
    assert reference.unexplained(completions) == []
