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

from engine.kernels import decode_attention, prefill_attention
from tests.engine.paged import DEVICE, TOLERANCE, PagedBatch, make_batch

pytestmark = pytest.mark.long

# (head_dim, queries per KV head, block size, tokens of a tile): odd ones too
SHAPES = [
    (16, 4, 4, 16),  (64, 8, 16, 128),  (80, 6, 16, 64),
     (128, 16, 64, 128),   (256, 20, 16, 128),
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
