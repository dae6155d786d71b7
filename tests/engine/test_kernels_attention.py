"""Paged attention kernels equal float64 attention, read and write nothing else, and the check can fail."""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed, so its kernels cannot run")

import engine.kernels
from engine.kernels import decode_attention, kv_store, prefill_attention
from tests.engine.paged import DEVICE, TOLERANCE, PagedBatch, make_batch

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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("split", [333, 200, 48, 1])
def test_decode_splits_do_not_show(split: int, dtype: torch.dtype) -> None:
    """One split, a long and a short one, splits of blocks, and the most that there may be."""
    batch = make_batch([1, 17, 100, 333], head_dim=64, kv_heads=1, dtype=dtype)
    assert batch.error(decode(batch, split=split)) < TOLERANCE[dtype]


@pytest.mark.parametrize("split", [64, 16])
def test_padding_rows_get_zeros_and_read_nothing(split: int) -> None:
    """Their block tables point to NaN; the rows between them are right."""
    batch = make_batch([0, 40, 0, 7, 0])
    out = decode(batch, split=split)
    assert batch.error(out) < TOLERANCE[torch.float32]
    assert (out[[0, 2, 4]] == 0).all()


def test_a_batch_of_padding_alone() -> None:
    batch = make_batch([0, 0])
    assert (decode(batch, split=16)[:2] == 0).all()


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


@pytest.mark.parametrize(("soft_cap", "size"), [(0.05, 1e3), (1.0, 1e2), (4.0, 1.0), (1e3, 1e-2)])
def test_soft_caps_are_exact_from_far_below_to_far_beyond(soft_cap: float, size: float) -> None:
    """Scores of about this size."""
    batch = make_batch([5, 130], [5, 60], head_dim=32, kv_heads=1, soft_cap=soft_cap)
    batch.query.mul_(size)
    assert batch.error(prefill(batch)) < TOLERANCE[torch.float32]


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


# Mutations: each is one slip of the pen in a kernel; the checks above must see it.
MUTATIONS = {
    "decode forgets its own token": (
        "decode_attention.py", "+ (context_len - 1)", "+ (context_len - 2)",
    ),
    "decode reads one token too far": (
        "decode_attention.py", "end = tl.minimum(start + length, context_len)",
        "end = tl.minimum(start + length, context_len + 1)",
    ),
    "splits overlap": ("decode_attention.py", "first + split * length", "first + split * (length - 1)"),
    "splits begin a token late": (
        "decode_attention.py", "start = first + split * length", "start = first + split * length + 1",
    ),
    "splits of another length than their number is for": (
        "decode_attention.py", "tl.cdiv(context_len - first, length), 1)",
        "tl.cdiv(context_len - first - 1, length), 1)",
    ),
    "merge drops the last split": (
        "decode_attention.py", "seq * max_splits * HEADS + kv_head * GROUP, num_splits,",
        "seq * max_splits * HEADS + kv_head * GROUP, num_splits - 1,",
    ),
    "the last but one merges": ("decode_attention.py", "== num_programs - 1", "== num_programs - 2"),
    "programs that have nothing to do are waited for": (
        "decode_attention.py", "num_programs = tl.minimum(num_splits, tl.num_programs(2))",
        "num_programs = tl.num_programs(2)",
    ),
    "the counter stays as it is": ("decode_attention.py", "tl.store(arrived, 0)", "tl.store(arrived, 1)"),
    "merge weighs splits by a wrong sum": (
        "decode_attention.py", "row_max + tl.log2(row_sum)", "row_max",
    ),
    "the mask hides the query's own token": (
        "kv_tile.py", "tokens[None, :] <= last", "tokens[None, :] < last",
    ),
    "the mask lets the next token through": (
        "kv_tile.py", "<= last[:, None]", "<= last[:, None] + 1",
    ),
    "values past the end are read": (
        "kv_tile.py", "values_ptr + places, mask=read", "values_ptr + places, mask=inside[None, :]",
    ),
    "no mask one tile too long": (
        "prefill_attention.py", "(first_token + 1 - begin) // TILE * TILE",
        "tl.cdiv(first_token + 1 - begin, TILE) * TILE",
    ),
    "chunks are placed at the start of the context": (
        "prefill_attention.py", "first_token = context_len - num_queries + tile_start",
        "first_token = tile_start",
    ),
    "the wrong KV head": ("prefill_attention.py", "head // GROUP", "head % GROUP"),
}  # fmt: skip
FEATURE_MUTATIONS = {
    "the window is a token too wide": ("kv_tile.py", "position - (WINDOW - 1)", "position - WINDOW"),
    "the window is a token too narrow": ("kv_tile.py", "position - (WINDOW - 1)", "position - (WINDOW - 2)"),
    "chunks begin a token late": ("kv_tile.py", "position // CHUNK", "(position - 1) // CHUNK"),
    "a tile's queries see what its first one does": ("kv_tile.py", "if first is not None:", "if False:"),
    "the window is masked one tile too short": (
        "prefill_attention.py", "tl.cdiv(first_seen(end - 1, WINDOW, CHUNK) - begin, TILE)",
        "(first_seen(end - 1, WINDOW, CHUNK) - begin) // TILE",
    ),
    "each split has the sink": ("decode_attention.py", "tl.where(split == 0, ", "tl.where(split >= 0, "),
    "decode leaves the sink out": (
        "decode_attention.py", "tl.where(split == 0, 1.0, row_sum)", "row_sum",
    ),
    "decode takes the sink in base 2": ("decode_attention.py", "other=0.0) * LOG2_E", "other=0.0)"),
    "prefill leaves the sink out": ("prefill_attention.py", "row_sum += 1.0", "row_sum += 0.0"),
    "prefill takes the sink in base 2": (
        "prefill_attention.py", "tl.load(sinks_ptr + head) * LOG2_E", "tl.load(sinks_ptr + head)",
    ),
    "the soft cap is left out": ("kv_tile.py", "scores = cap_scores(scores, SOFT_CAP)", "scores = scores"),
    "the soft cap is in base 2": ("kv_tile.py", "soft_cap * LOG2_E.value", "soft_cap"),
}  # fmt: skip

FP8_MUTATIONS = {
    f"{kernel} takes the {what} of {wrong}": (f"{kernel}_attention.py", right, right.replace(*change))
    for kernel in ("decode", "prefill")
    for what, right in (
        ("keys' scale", "log2_scale *= tl.load(key_scales_ptr + kv_head)"),
        ("values' scale", "result *= tl.load(value_scales_ptr + kv_head)"),
    )
    for wrong, change in (
        ("the first head", (" + kv_head", "")),
        ("the others", ("key_" if "key_" in right else "value_", "value_" if "key_" in right else "key_")),
    )
}


@pytest.fixture
def mutant(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[SimpleNamespace]:
    """The attention kernels with one line changed, imported from a copy under another name."""
    file, right, wrong = (MUTATIONS | FEATURE_MUTATIONS | FP8_MUTATIONS)[request.param]
    package = tmp_path / "mutant_kernels"
    shutil.copytree(Path(engine.kernels.__file__).parent, package, ignore=shutil.ignore_patterns("*.pyc"))
    for path in package.glob("*.py"):
        text = path.read_text()
        assert path.name != file or right in text
        text = text.replace(right, wrong) if path.name == file else text
        path.write_text(text.replace("engine.kernels", "mutant_kernels"))
    monkeypatch.syspath_prepend(tmp_path)
    yield SimpleNamespace(
        decode_attention=importlib.import_module("mutant_kernels.decode_attention"),
        prefill_attention=importlib.import_module("mutant_kernels.prefill_attention"),
    )
    for name in [name for name in sys.modules if name.startswith("mutant_kernels")]:
        del sys.modules[name]


@pytest.mark.filterwarnings("ignore:(invalid value|divide by zero):RuntimeWarning")  # a mutant's NaN
@pytest.mark.parametrize("mutant", MUTATIONS, indirect=True)
def test_a_slip_in_a_kernel_is_caught(mutant: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same two checks on the true kernels pass."""
    decodes = make_batch([1, 60, 97], head_dim=32)
    chunks = make_batch([70, 90], [70, 20], head_dim=32)
    for kernels, caught in ((KERNELS, False), (mutant, True)):
        set_tile(monkeypatch, kernels, 16)
        assert (worst_error(decodes, chunks, kernels) > 1e-3) == caught


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning", "ignore:All-NaN:RuntimeWarning")
@pytest.mark.parametrize("mutant", FEATURE_MUTATIONS, indirect=True)
def test_a_slip_in_a_feature_is_caught(mutant: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same two checks on the true kernels pass."""
    features = {"window": 50, "chunk": 80, "soft_cap": 1.0, "has_sinks": True}
    decodes = make_batch([1, 60, 79, 80, 81], head_dim=16, kv_heads=1, **features)
    chunks = make_batch([70, 90], [70, 20], head_dim=16, kv_heads=1, **features)
    for kernels, caught in ((KERNELS, False), (mutant, True)):
        set_tile(monkeypatch, kernels, 16)
        assert (worst_error(decodes, chunks, kernels) > 1e-3) == caught


@pytest.mark.parametrize("mutant", FP8_MUTATIONS, indirect=True)
def test_a_slip_with_scales_is_caught(mutant: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same two checks on the true kernels pass."""
    decodes = make_batch([1, 60], head_dim=16).as_fp8()
    chunks = make_batch([70, 20], [3, 20], head_dim=16).as_fp8()
    for kernels, caught in ((KERNELS, False), (mutant, True)):
        set_tile(monkeypatch, kernels, 16)
        assert (worst_error(decodes, chunks, kernels) > 1e-3) == caught


def worst_error(decodes: PagedBatch, chunks: PagedBatch, kernels: Any) -> float:
    """Of decodes in up to three splits by as many programs, twice over the same counters, and of chunks."""
    arrived = counters(decodes)
    return max(
        *(
            decodes.error(decode(decodes, split=48, programs=3, arrived=arrived, kernels=kernels))
            for _ in "12"
        ),
        chunks.error(prefill(chunks, kernels=kernels)),
    )
