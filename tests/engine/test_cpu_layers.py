"""The CPU's fused layer kernels equal the layers they stand in for, computed in float64.

In bfloat16 too: one rounding of the result apart, which leaves no room for sums that are rounded on the way.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("numba", reason="numba is not installed, so the CPU kernels cannot be compiled")

import numba

from engine.cpu_kernels.elementwise import (
    add_rms_norm,
    gelu_and_mul,
    norm_rotate_and_store,
    rms_norm,
    silu_and_mul,
    store_kv,
)
from engine.cpu_kernels.scalars import BFLOAT16, narrow
from engine.layers.rotary import apply_rotary

CLOSE = {torch.float32: {"rtol": 4e-6, "atol": 4e-6}, torch.bfloat16: {"rtol": 2**-8 + 4e-6, "atol": 4e-6}}

both_dtypes = pytest.mark.parametrize("dtype", CLOSE, ids=str)


@pytest.fixture(params=[1, 2], autouse=True)
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(1)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rotation_of(
    num_tokens: int, dim: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [tokens, 1, dim], cut out of one table as RotaryEmbedding does it."""
    angles = (random(num_tokens, 1, dim // 2, seed=9) * 1000).repeat(1, 1, 2)
    cos, sin = torch.stack((angles.cos(), angles.sin()), 1).to(dtype).unbind(1)
    return cos, sin


@both_dtypes
@pytest.mark.parametrize(("num_tokens", "dim"), [(0, 48), (1, 48), (7, 1024), (33, 40), (65, 1)])
def test_add_rms_norm(num_tokens: int, dim: int, dtype: torch.dtype) -> None:
    """The norm is of the sum as it is rounded; a model may keep its norms' weights in float32."""
    x, residual = random(num_tokens, dim, dtype=dtype), random(num_tokens, dim, seed=1, dtype=dtype)
    for weight in (random(dim, seed=2, dtype=dtype), random(dim, seed=2)):
        normed, total = add_rms_norm(x, residual, weight, 1e-3)
        assert torch.equal(total, x + residual)
        expected = norm(total.double(), weight.double(), 1e-3)
        assert normed.dtype == dtype
        torch.testing.assert_close(normed.double(), expected, **CLOSE[dtype])


@both_dtypes
@pytest.mark.parametrize("dim", [48, 1024, 33])
def test_rms_norm(dim: int, dtype: torch.dtype) -> None:
    """Of rows that lie apart, as a part of a merged projection does, and of heads."""
    weight = random(dim, seed=2, dtype=dtype)
    for x in (random(0, dim), random(1, dim), random(37, 3 * dim)[:, dim : 2 * dim], random(9, 4, dim)):
        x = x.to(dtype)
        normed = rms_norm(x, weight, 1e-3)
        torch.testing.assert_close(normed.double(), norm(x.double(), weight.double(), 1e-3), **CLOSE[dtype])
        assert normed.is_contiguous()


def check_turned(
    merged: torch.Tensor,
    num_heads: int,
    kv_heads: int,
    rotation: tuple[torch.Tensor, torch.Tensor],
    norms: tuple[torch.Tensor, torch.Tensor] | None,
) -> None:
    """Queries, keys and values as views of one merged projection; slots out of order, some of them -1."""
    num_tokens, _, head_dim = merged.shape
    query, key, value = merged.split((num_heads, kv_heads, kv_heads), dim=1)
    slots = torch.randperm(4 * 7, generator=torch.Generator().manual_seed(1))[:num_tokens]
    slots[2::5] = -1
    caches = [torch.full((4, 7, kv_heads, head_dim), float("nan"), dtype=merged.dtype) for _ in range(2)]
    turned = norm_rotate_and_store(query, key, value, rotation, norms, 1e-5, *caches, slots)
    keys, values = (cache.flatten(0, 1) for cache in caches)
    stored = slots >= 0
    assert torch.equal(values[slots[stored]], value[stored])
    others = torch.ones(len(keys), dtype=torch.bool).index_fill_(0, slots[stored], False)
    assert keys[others].isnan().all()
    assert values[others].isnan().all()
    rotary_dim = rotation[0].shape[-1]
    for i, (got, x) in enumerate(((turned, query), (keys[slots[stored]], key[stored]))):
        wide = x.double() if norms is None else norm(x.double(), norms[i].double(), 1e-5)
        angles = [part.double() if i == 0 else part[stored].double() for part in rotation]
        expected = apply_rotary(wide, *angles)
        assert torch.equal(expected[..., rotary_dim:], wide[..., rotary_dim:])
        torch.testing.assert_close(got.double(), expected, **CLOSE[merged.dtype])
    assert turned.is_contiguous()


@both_dtypes
@pytest.mark.parametrize("has_norms", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 16), (5, 1, 96), (40, 8, 128)])
def test_norm_rotate_and_store(
    heads: int, kv_heads: int, head_dim: int, has_norms: bool, dtype: torch.dtype
) -> None:
    """At random positions."""
    weights = (random(head_dim, seed=1, dtype=dtype), random(head_dim, seed=2, dtype=dtype))
    merged = random(19, heads + 2 * kv_heads, head_dim, dtype=dtype)
    check_turned(merged, heads, kv_heads, rotation_of(19, head_dim, dtype), weights if has_norms else None)


@both_dtypes
@pytest.mark.parametrize("per_head", [True, False], ids=["weight_per_head", "one_weight"])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(16, 4), (80, 32), (96, 96), (40, 2)])
def test_a_part_of_each_head_is_rotated(
    head_dim: int, rotary_dim: int, per_head: bool, dtype: torch.dtype
) -> None:
    """The rest passes, normalised with the part; each head may have a norm's weight of its own.

    Beside bfloat16 heads, weights and angles may be float32: some families keep them so.
    """
    shapes = [(5, head_dim), (2, head_dim)] if per_head else [(head_dim,)] * 2
    weights = (random(*shapes[0], seed=2), random(*shapes[1], seed=3))
    for norms in (weights, None):
        merged = random(19, 9, head_dim, dtype=dtype)
        check_turned(merged, 5, 2, rotation_of(19, rotary_dim), norms)


@both_dtypes
@pytest.mark.parametrize("gelu", [True, False], ids=["gelu", "silu"])
@pytest.mark.parametrize(("num_tokens", "dim"), [(1, 96), (9, 3072), (40, 33)])
def test_gate_and_mul(num_tokens: int, dim: int, gelu: bool, dtype: torch.dtype) -> None:
    """From gates that shut, over the range that counts, to gates wide open."""
    gate_up = random(num_tokens, 2 * dim, dtype=dtype) * 4
    gate_up[0, :6] = torch.tensor([-1e9, -200.0, -88.0, 88.0, 200.0, 1e9])
    gate, up = gate_up.double().chunk(2, dim=-1)
    if gelu:
        expected = F.gelu(gate, approximate="tanh") * up
        torch.testing.assert_close(gelu_and_mul(gate_up).double(), expected, **CLOSE[dtype])
    else:
        torch.testing.assert_close(silu_and_mul(gate_up).double(), F.silu(gate) * up, **CLOSE[dtype])


def test_numbers_are_rounded_to_bfloat16_as_torch_does_it() -> None:
    """Every upper half of a float32, with lower halves below, at and above the middle; NaN stays NaN."""
    halves = torch.arange(1 << 16, dtype=torch.int64)
    lower = torch.tensor([0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    numbers = (halves[:, None] << 16 | lower).flatten().to(torch.int32).view(torch.float32)
    zeros = torch.zeros(len(numbers), dtype=torch.int16).view(torch.bfloat16)

    @numba.njit
    def round_all(numbers: Any, rounded: Any) -> None:
        for i in range(len(numbers)):
            rounded[i] = narrow(numbers[i], BFLOAT16)

    round_all(numbers.numpy(), zeros.view(torch.uint16).numpy())
    torch.testing.assert_close(zeros, numbers.to(torch.bfloat16), rtol=0, atol=0, equal_nan=True)


@both_dtypes
def test_store_kv_skips_padding_and_touches_nothing_else(dtype: torch.dtype) -> None:
    """Views with gaps into random slots; a slot of -1 is no slot, least of all the last one."""
    kv = random(21, 3, 2, 24, dtype=dtype)
    keys, values = kv[:, 0], kv[:, 2]
    slots = torch.randperm(6 * 7, generator=torch.Generator().manual_seed(1))[:21]
    slots[slots == 41] = -1
    slots[::4] = -1
    caches = [torch.full((6, 7, 2, 24), float("nan"), dtype=dtype) for _ in range(2)]
    store_kv(keys, values, *caches, slots)
    for given, cache in zip((keys, values), caches, strict=True):
        expected = torch.full((42, 2, 24), float("nan"), dtype=dtype)
        expected[slots[slots >= 0]] = given[slots >= 0]
        torch.testing.assert_close(cache.flatten(0, 1), expected, rtol=0, atol=0, equal_nan=True)
