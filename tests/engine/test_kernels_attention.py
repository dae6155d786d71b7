"""Paged attention kernels equal float64 attention, and read and write nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed, so its kernels cannot run")

from engine.kernels import decode_attention, kv_store, prefill_attention
from tests.engine.paged import DEVICE, TOLERANCE, PagedBatch, make_batch

pytestmark = pytest.mark.long

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# (head_dim, queries per KV head, block size, tokens of a tile): odd ones too
SHAPES = [
    (16, 4, 4, 16), (32, 1, 16, 16), (64, 8, 16, 128), (64, 2, 32, 16), (80, 6, 16, 64), (96, 3, 48, 16),
    (128, 2, 16, 64), (128, 16, 64, 128), (128, 4, 256, 32), (256, 2, 128, 32), (256, 20, 16, 128),
]  # fmt: skip
KERNELS = SimpleNamespace(decode_attention=decode_attention, prefill_attention=prefill_attention)


def set_tile(monkeypatch: pytest.MonkeyPatch, kernels: Any, tile: int) -> None:
    """Take tiles of this size in the interpreter; a GPU's shared memory holds what the kernels choose."""
    if DEVICE.type == "cuda":
        return
    for module in (kernels.decode_attention, kernels.prefill_attention):
        monkeypatch.setattr(module, "tile_tokens", lambda *args: tile)


def named(batch: PagedBatch) -> dict[str, Any]:
    """What the kernels are told of the layer's attention."""
    names = ("scale", "window", "chunk", "soft_cap", "sinks", "scales")
    return {name: getattr(batch, name) for name in names}


def decode(
    batch: PagedBatch,
    *,
    split: int,
    programs: int = 32,
    order: list[int] | None = None,
    arrived: torch.Tensor | None = None,
    kernels: Any = KERNELS,
) -> torch.Tensor:
    """Run the decode kernel on a batch of one query for each sequence; two more rows stay poisoned.

    split: tokens of a split.  programs: at most so many for each sequence.  The scratch memory holds NaN.
    """
    rows = kernels.decode_attention.DecodeRows(
        batch.tensor(np.arange(len(batch.query))), batch.tensor(batch.context_lens),
        batch.tensor(batch.block_tables), int(batch.context_lens.max()),
        None if order is None else batch.tensor(order),
    )  # fmt: skip
    out = batch.poisoned_output(num_more_rows=2)
    if arrived is None:
        arrived = counters(batch)
    with poisoned_scratch():
        kernels.decode_attention.decode_attention(
            batch.query, batch.key_cache, batch.value_cache, rows, arrived, out,
            num_programs=programs, split_tokens=split, **named(batch),
        )  # fmt: skip
    assert out[len(batch.query) :].isnan().all()
    return out


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(left.nan_to_num(7.0), right.nan_to_num(7.0))


def counters(batch: PagedBatch) -> torch.Tensor:
    return batch.tensor(np.zeros(len(batch.query) * batch.key_cache.shape[2]))


@contextmanager
def poisoned_scratch() -> Iterator[None]:
    """torch.empty gives NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # which fills what it does not initialise
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def prefill(batch: PagedBatch, kernels: Any = KERNELS) -> torch.Tensor:
    """Run the prefill kernel on all sequences of a batch; two more rows stay poisoned."""
    size = kernels.prefill_attention.QUERY_TILE
    tiles = [(i, start) for i, n in enumerate(batch.query_lens) for start in range(0, n, size)]
    ends = np.cumsum(batch.query_lens)
    prefills = kernels.prefill_attention.PrefillTiles(
        batch.tensor([i for i, _ in tiles]), batch.tensor([start for _, start in tiles]),
        batch.tensor(np.stack((ends - batch.query_lens, ends), axis=1)),
        batch.tensor(batch.context_lens), batch.tensor(batch.block_tables),
    )  # fmt: skip
    out = batch.poisoned_output(num_more_rows=2)
    kernels.prefill_attention.prefill_attention(
        batch.query, batch.key_cache, batch.value_cache, prefills, out, **named(batch)
    )
    assert out[len(batch.query) :].isnan().all()
    return out


@pytest.mark.parametrize(("head_dim", "group", "block_size", "tile"), SHAPES)
def test_decode_equals_float64(
    head_dim: int, group: int, block_size: int, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contexts of 1, a block less 1, a block, a block and 1, three blocks and 1; one split and several."""
    set_tile(monkeypatch, KERNELS, tile)
    lens = [1, block_size - 1, block_size, block_size + 1, 3 * block_size + 1]
    batch = make_batch(lens, head_dim=head_dim, group=group, block_size=block_size)
    for split in (512, 16):
        assert batch.error(decode(batch, split=split)) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("split", [64, 16])
def test_padding_rows_get_zeros_and_read_nothing(split: int) -> None:
    """Their block tables point to NaN; the rows between them are right."""
    batch = make_batch([0, 40, 0, 7, 0])
    out = decode(batch, split=split)
    assert batch.error(out) < TOLERANCE[torch.float32]
    assert (out[[0, 2, 4]] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_of_a_row_depend_on_nothing_but_its_context(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, in a batch, started in another order, and by one program, three, or one for each split."""
    set_tile(monkeypatch, KERNELS, 16)
    batch = make_batch([90, 0, 33, 257], kv_heads=2, group=3, head_dim=32, dtype=dtype)
    out = decode(batch, split=32)
    for programs, order in ((1, None), (3, [3, 0, 2, 1]), (32, [1, 2, 3, 0])):
        assert same_bits(decode(batch, split=32, programs=programs, order=order), out)
    for i in (0, 2, 3):
        alone = replace(
            batch, query=batch.query[i : i + 1], block_tables=batch.block_tables[i : i + 1],
            context_lens=batch.context_lens[i : i + 1], query_lens=batch.query_lens[i : i + 1],
        )  # fmt: skip
        assert torch.equal(decode(alone, split=32)[0], out[i])


def test_a_launch_leaves_the_counters_to_the_next() -> None:
    """Launch upon launch over the same counters, as graphs are replayed; contexts grow meanwhile."""
    arrived = counters(make_batch([1, 1, 1]))
    for lens in ([31, 65, 3], [32, 66, 4], [33, 0, 100]):
        batch = make_batch(lens, head_dim=16)
        for programs in (1, 2, 7):
            out = decode(batch, split=32, programs=programs, arrived=arrived)
            assert batch.error(out) < TOLERANCE[torch.float32]
            assert not arrived.any()


@pytest.mark.parametrize(("head_dim", "group", "block_size", "tile"), SHAPES)
def test_prefill_equals_float64(
    head_dim: int, group: int, block_size: int, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole prompts and chunks behind a cached context, around a tile's and a block's size."""
    set_tile(monkeypatch, KERNELS, tile)
    query_lens = [2, 64, 65, 17, 1]
    context_lens = [2, 64, 65, 17 + 3 * block_size, block_size + 1]
    batch = make_batch(
        context_lens, query_lens, head_dim=head_dim, group=group, kv_heads=1, block_size=block_size
    )
    assert batch.error(prefill(batch)) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tile", [16, 128])
def test_prefill_in_each_dtype(dtype: torch.dtype, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles of queries behind several tiles of cached context."""
    set_tile(monkeypatch, KERNELS, tile)
    batch = make_batch([140 + 150, 130], [140, 130], kv_heads=1, dtype=dtype)
    assert batch.error(prefill(batch)) < TOLERANCE[dtype]


# Of contexts up to 130 and tiles of 16: a window of the query alone, within a tile, over several, longer than
# the contexts; chunks that end within tiles and blocks; each by itself and with all others.
FEATURES: list[dict[str, Any]] = [
    {"window": 1},
    {"window": 7, "has_sinks": True},
    {"window": 40},
    {"window": 500, "soft_cap": 0.5},
    {"chunk": 24},
    {"chunk": 64, "window": 33, "soft_cap": 2.0, "has_sinks": True},
    {"soft_cap": 50.0},
    {"has_sinks": True},
]
# (head_dim, queries per KV head, block size, dtype), in turn with the features
HEADS = [
    (64, 1, 16, torch.float32), (80, 3, 32, torch.float32), (96, 2, 16, torch.float32),
    (128, 2, 16, torch.float32), (64, 3, 16, torch.bfloat16), (32, 2, 48, torch.bfloat16),
    (256, 1, 16, torch.float32), (128, 2, 64, torch.float16),
]  # fmt: skip
CASES = list(zip(FEATURES, HEADS, strict=True))


@pytest.mark.parametrize(("features", "heads"), CASES, ids=str)
def test_decode_with_features_equals_float64(
    features: dict[str, Any], heads: tuple[int, int, int, torch.dtype], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What no query sees is NaN. One split and several."""
    set_tile(monkeypatch, KERNELS, 16)
    head_dim, group, block_size, dtype = heads
    batch = make_batch(
        [130, 1, 0, 25], head_dim=head_dim, group=group, kv_heads=1, block_size=block_size, dtype=dtype,
        **features,
    )  # fmt: skip
    for split in (130, 48):
        out = decode(batch, split=split)
        assert batch.error(out) < TOLERANCE[dtype]
        assert (out[2] == 0).all()


def test_one_sink_counts_once_in_32_splits() -> None:
    """Also where the sinks are nearly all of the softmax, as each split's own they would be all of it."""
    batch = make_batch([600, 0, 3], head_dim=16, kv_heads=1, has_sinks=True, window=550)
    assert batch.sinks is not None
    batch.sinks.copy_(torch.tensor([9.0, -30.0]))
    out = decode(batch, split=16)
    assert batch.error(out) < TOLERANCE[torch.float32]
    assert 0 < out[0, 0].abs().max() < 0.1 < out[0, 1].abs().max()


@pytest.mark.parametrize(("features", "heads"), CASES, ids=str)
def test_prefill_with_features_equals_float64(
    features: dict[str, Any], heads: tuple[int, int, int, torch.dtype], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What no query sees is NaN. A prompt of three tiles of queries, and chunks far behind their start."""
    set_tile(monkeypatch, KERNELS, 16)
    head_dim, group, block_size, dtype = heads
    batch = make_batch(
        [130, 97, 66], [130, 2, 65], head_dim=head_dim, group=group, kv_heads=1, block_size=block_size,
        dtype=dtype, **features,
    )  # fmt: skip
    # many rows see few tokens, so that the interpreter's rounding of weights towards zero shows
    assert batch.error(prefill(batch)) < 1.5 * TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kv_heads", "head_dim"), [(3, 16), (8, 128)])
def test_store_writes_the_slots_and_nothing_else(dtype: torch.dtype, kv_heads: int, head_dim: int) -> None:
    """Strided keys and values; slots of -1 are skipped."""
    generator = torch.Generator().manual_seed(0)
    merged = torch.randn((33, 2 * kv_heads + 1, head_dim), generator=generator).to(dtype).to(DEVICE)
    keys, values = merged[:, 1 : 1 + kv_heads], merged[:, 1 + kv_heads :]
    caches = [torch.full((5, 16, kv_heads, head_dim), float("nan"), dtype=dtype, device=DEVICE) for _ in "kv"]
    slots = torch.randperm(80, generator=generator)[:33]
    slots[[0, 7, 31, 32]] = -1
    kv_store.store_kv(keys, values, *caches, slots.to(DEVICE))
    used = (slots >= 0).nonzero()[:, 0].to(DEVICE)
    for new, cache in zip((keys, values), caches, strict=True):
        flat = cache.flatten(0, 1)
        assert torch.equal(flat[slots[slots >= 0].to(DEVICE)], new[used])
        assert flat.isnan().flatten(1).all(1).sum() == 80 - len(used)
