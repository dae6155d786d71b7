"""An FP8 KV cache: what is stored, that attention over it is exact, and that the whole engine takes it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine import ConfigError, Engine, EngineConfig
from engine.attention.base import KernelBackend
from engine.attention.features import AttentionFeatures
from engine.attention.kv_cache import (
    FP8,
    KVCache,
    LayerKVCache,
    choose_scales,
    largest_magnitudes,
    quantize,
)
from engine.attention.torch_backend import TorchBackend
from engine.run.forward.warm_up import make_step
from tests.engine.checkpoints import SHAPES, pool_bytes
from tests.engine.paged import DEVICE, TOLERANCE, attend_by, make_batch
from tests.engine.reference import Reference

CPU = torch.device("cpu")
SHAPE = next(shape for shape in SHAPES if shape.name == "gqa4_tied")
#: Numbers at every edge: halfway between two of FP8's, subnormal, too large, no numbers.
EDGES = [
    0.0, 2**-9, 2**-10, 1.5 * 2**-9, 2.5 * 2**-9, 2**-6, 17.0, 19.0, 1.0625, 1.1875, 447.0, 448.0, 464.0,
    465.0, 1e9, float("inf"),
]  # fmt: skip


def triton_backend() -> KernelBackend:
    pytest.importorskip("triton", reason="triton is not installed, so its kernels cannot run")
    from engine.attention.triton_backend import TritonBackend

    return TritonBackend(DEVICE)


@pytest.fixture(params=["torch", "triton"])
def backend(request: pytest.FixtureRequest) -> KernelBackend:
    return TorchBackend(DEVICE) if request.param == "torch" else triton_backend()


def new_tokens(num_tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys and values of 3 heads of 16, from below FP8's smallest number to beyond its largest."""
    generator = torch.Generator().manual_seed(0)
    both = torch.randn((2, num_tokens, 3, 16), generator=generator)
    both *= 10.0 ** torch.linspace(-4, 3, num_tokens)[:, None, None]
    both[0, :, 1] = torch.tensor([*EDGES])
    both[1, :, 2] = -torch.tensor([*EDGES])
    keys, values = both.to(dtype).to(DEVICE)
    return keys, values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_are_rounded_to_the_nearest_and_saturate(
    dtype: torch.dtype, backend: KernelBackend
) -> None:
    """Never to NaN, which FP8 has in place of infinity; a NaN stays one. Padding goes nowhere."""
    keys, values = new_tokens(9, dtype)
    keys[3, 0, 5] = torch.nan
    scales = tuple(
        2.0 ** torch.tensor(each, dtype=torch.float32, device=DEVICE)
        for each in ([0, 0, -3], [2, -5, 0])
    )
    pools = [torch.zeros((2, 8, 3, 16), dtype=torch.uint8, device=DEVICE).view(FP8) for _ in "kv"]
    slots = torch.tensor([15, 2, 3, 9, 8, 0, 1, 4, 12], device=DEVICE)
    backend.store(keys, values, LayerKVCache(pools[0], pools[1], scales), slots)
    for x, pool, own in zip((keys, values), pools, scales, strict=True):
        stored = pool.flatten(0, 1)[slots].float().cpu()
        exact = (x.double().cpu() / own.cpu()[:, None]).clamp(-448, 448)
        assert torch.equal(stored.isnan(), exact.isnan())
        codes = torch.arange(256, dtype=torch.uint8).view(FP8).double()
        nearest = (codes[~codes.isnan()] - exact.nan_to_num()[..., None]).abs().amin(-1)
        assert torch.equal((stored.double() - exact).abs().nan_to_num(), nearest)
        assert torch.equal(stored.nan_to_num(7), quantize(x, own).float().cpu().nan_to_num(7))
    assert pools[0].flatten(0, 1).float()[[5, 6, 7, 10, 11, 13, 14]].abs().sum() == 0


def store_alone(keys: Tensor, values: Tensor, cache: LayerKVCache, slots: Tensor) -> None:
    triton_backend().store(keys, values, cache, slots)


def store_turned(keys: Tensor, values: Tensor, cache: LayerKVCache, slots: Tensor) -> None:
    """By the kernel that also rotates, here by nothing."""
    kernels = triton_backend().layer_kernels
    assert kernels is not None
    rotation = torch.ones_like(keys[:, :1]), torch.zeros_like(keys[:, :1])
    kernels.norm_rotate_and_store(
        keys.clone(), keys, values, rotation, None, 1e-6, tuple(cache), slots
    )


@pytest.mark.parametrize("store", [TorchBackend(DEVICE).store, store_alone, store_turned])
@pytest.mark.parametrize("scale", [1.0, 0.03, 1e-30, 5e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_beyond_the_range_become_the_largest_one(
    dtype: torch.dtype, scale: float, store: Callable[..., None]
) -> None:
    """On both sides of it, and up to the largest number of the dtype; infinity among the values too."""
    largest = torch.finfo(dtype).max
    edges = torch.tensor([430.0, 448.0, 449.0, 463.0, 465.0, 480.0, 512.0, 1e6]) * scale
    edges = torch.cat((edges, torch.tensor([largest])))
    keys = torch.cat((edges, -edges)).repeat(2, 1).view(2, 2, 9).to(dtype).to(DEVICE)
    keys = torch.nn.functional.pad(keys, (0, 7), value=scale)
    values = keys.clone()
    values[0, 0, :2] = torch.tensor([torch.inf, -torch.inf])
    values[1, 1, :1] = torch.nan
    scales = (torch.full((2,), scale, device=DEVICE), torch.full((2,), scale, device=DEVICE))
    pools = [torch.zeros((1, 4, 2, 16), dtype=torch.uint8, device=DEVICE).view(FP8) for _ in "kv"]
    slots = torch.tensor([2, 1], device=DEVICE)
    with np.errstate(over="ignore", invalid="ignore"):  # in the interpreter
        store(keys, values, LayerKVCache(pools[0], pools[1], scales), slots)
    stored = [pool.flatten(0, 1)[[2, 1]].float().cpu() for pool in pools]
    for x, found in zip((keys, values), stored, strict=True):
        exact = x.double().cpu() / scale
        beyond = exact.abs() > 448
        assert beyond.sum() > 16
        assert torch.equal(found[beyond], exact[beyond].sign().float() * 448)
        assert torch.equal(found.isnan(), exact.isnan())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_scale_that_the_dtype_does_not_hold_is_taken_as_it_is(dtype: torch.dtype) -> None:
    """What is read of one token is its value, rounded once. (Triton's interpreter rounds otherwise.)"""
    batch = make_batch([1, 1], dtype=dtype, kv_heads=3).as_fp8()
    found = attend_by(TorchBackend(DEVICE), batch)
    assert torch.equal(found.cpu(), batch.expected().float().to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("shape", "features"),
    [
        ({"head_dim": 64, "group": 1, "kv_heads": 3}, {}),
        (
            {"head_dim": 80, "group": 3, "block_size": 32},
            {"window": 40, "has_sinks": True, "has_slopes": True},
        ),
        ({"head_dim": 128, "group": 2, "block_size": 48}, {"soft_cap": 2.0, "chunk": 64}),
    ],
    ids=str,
)
def test_attention_equals_float64_over_what_is_stored(
    dtype: torch.dtype, shape: dict[str, int], features: dict[str, Any], backend: KernelBackend
) -> None:
    """Decodes of one split and of two, and chunks of prompts."""
    contexts, queries = [130, 1, 700, 90, 40], [1, 1, 1, 70, 40]
    batch = make_batch(contexts, queries, dtype=dtype, **shape, **features).as_fp8()
    metadata, _ = backend.build_metadata(batch.block_tables, batch.context_lens, batch.query_lens)
    out = backend.forward(
        batch.query, batch.cache, metadata, batch.features, batch.sinks, batch.slopes
    )
    assert batch.error(out) < 1.5 * TOLERANCE[dtype]


@pytest.mark.parametrize("exponent", [40, -60])
def test_queries_of_any_size_give_the_same_bits(exponent: int, backend: KernelBackend) -> None:
    """The kernels multiply in float16, which holds neither 2**40 nor 2**-60."""
    batch = make_batch([130, 200, 40], [1, 1, 40], dtype=torch.bfloat16).as_fp8()
    assert batch.scales is not None
    keys, values = batch.scales
    other = replace(
        batch, query=batch.query * 2.0**exponent, scales=(keys * 2.0**-exponent, values)
    )
    expected, found = (attend_by(backend, each) for each in (batch, other))
    assert torch.equal(found, expected)


def layers(count: int) -> list[AttentionFeatures]:
    return [AttentionFeatures(4, 2, 16, 0.25)] * count


def test_scales_leave_room_for_eight_times_the_largest() -> None:
    """Of each head, of keys and of values; a head of zeros has 1."""
    cache = KVCache(
        layers(2), num_blocks=3, block_size=4, dtype=torch.bfloat16, device=CPU, scales=None
    )
    cache.layers[0].keys[1, 2, 0, 7] = -56.0  # 8 * 56 is the largest of FP8
    cache.layers[0].keys[2, 0, 1, 1] = 56.5
    cache.layers[1].values[0, 0, 1, 3] = 1e-3
    first, second = (
        [choose_scales(largest_magnitudes(pool)).tolist() for pool in (layer.keys, layer.values)]
        for layer in cache.layers
    )
    assert first == [[1.0, 2.0], [1.0, 1.0]]
    assert second == [[1.0, 1.0], [1.0, 2.0**-15]]


def config(folder: Path, **changes: Any) -> EngineConfig:
    values: dict[str, Any] = {
        "dtype": "float32", "max_model_len": 200, "max_num_seqs": 8, "max_num_batched_tokens": 300,
        "kv_cache_bytes": pool_bytes(SHAPE, 100), "attention_backend": "torch", "kv_cache_dtype": "fp8_e4m3",
    }  # fmt: skip
    return EngineConfig(str(folder), **{**values, **changes})


def test_an_unknown_name_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype='fp8' must be 'auto' or 'fp8_e4m3'"):
        config(folder, kv_cache_dtype="fp8")


def logits_of(folder: Path, prompt: list[int], **changes: Any) -> tuple[Tensor, int]:
    """Of the tokens of a prompt, the last ones decoded one by one; and the pool's blocks."""
    with Engine(config(folder, **changes)) as built:
        runner: Any = built._open_runner()
        ids, n = np.array(prompt), len(prompt)
        steps = [(0, n - 3), (n - 3, n - 2), (n - 2, n - 1), (n - 1, n)]
        out = []
        for start, end in steps:
            step = make_step([end - start], [end], 16, 100)
            out.append(runner.logits(replace(step, token_ids=ids[start:end])))
        return torch.cat(out).float(), runner.pool_size.num_blocks


@pytest.mark.long
def test_logits_stay_close_and_the_pool_holds_four_times_as_much_of_float32(
    folders: dict[str, Path],
) -> None:
    """Beside the spread of the logits; not at all as close with one head's scales for another."""
    folder = folders[SHAPE.name]
    reference = Reference(folder)
    prompt = max((p for p in reference.prompts if len(p) < 150), key=len)
    plain, num_blocks = logits_of(folder, prompt, kv_cache_dtype="auto")
    for name in ("torch", "triton"):
        if name == "triton":
            pytest.importorskip("triton")
        found, num_fp8_blocks = logits_of(folder, prompt, attention_backend=name)
        error = ((found - plain).square().mean(-1).sqrt() / plain.std(-1)).max()
        assert 1e-4 < error < 0.15
        assert num_fp8_blocks == 4 * num_blocks
