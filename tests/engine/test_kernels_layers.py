"""Fused layer kernels equal the layers they stand in for, computed in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton", reason="triton is not installed, so its kernels cannot run")

from engine.kernels.gate_and_mul import clamped_swiglu_and_mul, gelu_and_mul, silu_and_mul
from engine.kernels.rms_norm import add_rms_norm, rms_norm
from engine.kernels.rotary import norm_rotate_and_store
from engine.layers.activation import ClampedSwigluAndMul
from engine.layers.rotary import RotaryEmbedding, apply_rotary
from engine.layers.rotary_scaling import Rope
from tests.engine.paged import DEVICE

pytestmark = pytest.mark.long

# One rounding of a result of a few units in each dtype; the interpreter rounds bfloat16 towards zero.
DTYPES = {torch.float32: 4e-6, torch.float16: 6e-3, torch.bfloat16: 4e-2}


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "dim"), [(1, 48), (7, 1024), (33, 40), (3, 5120), (65, 1)])
def test_add_rms_norm(num_tokens: int, dim: int, dtype: torch.dtype) -> None:
    """Both results; the norm is of the sum as it is stored."""
    x, residual = random(num_tokens, dim, dtype=dtype), random(num_tokens, dim, dtype=dtype, seed=1)
    weight = random(dim, dtype=dtype, seed=2)
    normed, total = add_rms_norm(x, residual, weight, 1e-3)
    expected = x.double() + residual.double()
    torch.testing.assert_close(total.double(), expected, rtol=DTYPES[dtype], atol=DTYPES[dtype])
    expected = norm(total.double(), weight.double(), 1e-3)
    torch.testing.assert_close(normed.double(), expected, rtol=DTYPES[dtype], atol=DTYPES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [48, 1024, 33])
def test_rms_norm(dim: int, dtype: torch.dtype) -> None:
    """Of rows that lie apart, as a part of a merged projection does, and of heads."""
    merged = random(37, 3 * dim, dtype=dtype)
    weight = random(dim, dtype=dtype, seed=2)
    for x in (merged[:1, :dim], merged[:, dim : 2 * dim], random(9, 4, dim, dtype=dtype)):
        normed = rms_norm(x, weight, 1e-3)
        expected = norm(x.double(), weight.double(), 1e-3)
        torch.testing.assert_close(normed.double(), expected, rtol=DTYPES[dtype], atol=DTYPES[dtype])
        assert normed.is_contiguous()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_norms", [True, False])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(4, 2, 16), (16, 8, 128), (5, 1, 96), (40, 8, 64)]
)
def test_norm_rotate_and_store(
    heads: int, kv_heads: int, head_dim: int, has_norms: bool, dtype: torch.dtype
) -> None:
    """Views of one merged projection, at positions far apart, to slots in any order."""
    check_norm_rotate_and_store(heads, kv_heads, head_dim, head_dim, dtype, dtype if has_norms else None)


@pytest.mark.parametrize(
    ("dtype", "weights"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16, None)],
)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "rotary_dim"), [(4, 2, 16, 4), (5, 1, 80, 32), (8, 8, 128, 64)]
)
@pytest.mark.parametrize("per_head", [False, True])
def test_a_part_of_each_head_is_rotated(
    heads: int,
    kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    per_head: bool,
    dtype: torch.dtype,
    weights: torch.dtype | None,
) -> None:
    """The rest passes, normalised with the part; each head may have a norm's weight of its own."""
    check_norm_rotate_and_store(heads, kv_heads, head_dim, rotary_dim, dtype, weights, per_head=per_head)


def check_norm_rotate_and_store(
    heads: int,
    kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    dtype: torch.dtype,
    weight_dtype: torch.dtype | None,
    *,
    per_head: bool = False,
) -> None:
    merged = random(19, heads + 2 * kv_heads, head_dim, dtype=dtype)
    query, key, value = merged.split([heads, kv_heads, kv_heads], dim=1)
    norms = None
    if weight_dtype is not None:
        shapes = [(count, head_dim) if per_head else (head_dim,) for count in (heads, kv_heads)]
        norms = tuple(random(*shape, dtype=weight_dtype, seed=i) for i, shape in enumerate(shapes, 1))
    rope = Rope("default", rotary_dim, 500.0, 3000, {})
    rotary = RotaryEmbedding(rope, 3000, dtype=dtype, device=DEVICE)
    rotation = rotary(torch.arange(19, device=DEVICE) * 150)
    wide = [part.double() for part in rotation]
    slots = torch.randperm(24, generator=torch.Generator().manual_seed(0))[:19].to(DEVICE)
    slots[[3, 18]] = -1
    kept = slots >= 0
    # a block before the first, for what a slot of -1 would hit
    pools = [torch.full((7, 4, kv_heads, head_dim), 77.0, dtype=dtype, device=DEVICE) for _ in range(2)]
    caches = [pool[1:] for pool in pools]
    turned = norm_rotate_and_store(query, key, value, rotation, norms, 1e-5, *caches, slots)
    assert turned.is_contiguous()
    key_slots, value_slots = (cache.flatten(0, 1) for cache in caches)
    for i, (got, x, rows) in enumerate(((turned, query, slice(None)), (key_slots[slots[kept]], key, kept))):
        x = x.double() if norms is None else norm(x.double(), norms[i].double(), 1e-5)
        expected = apply_rotary(x, *wide)[rows]
        torch.testing.assert_close(got.double(), expected, rtol=DTYPES[dtype], atol=DTYPES[dtype])
    assert torch.equal(value_slots[slots[kept]], value[kept])
    others = torch.ones(24, dtype=torch.bool, device=DEVICE).index_fill_(0, slots[kept], False)
    for pool, stored in zip(pools, (key_slots, value_slots), strict=True):
        assert (stored[others] == 77.0).all()
        assert (pool[0] == 77.0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "dim"), [(1, 96), (9, 3072), (40, 33)])
def test_silu_and_mul_and_gelu_and_mul(num_tokens: int, dim: int, dtype: torch.dtype) -> None:
    gate_up = random(num_tokens, 2 * dim, dtype=dtype) * 4
    gate, up = gate_up.double().chunk(2, dim=-1)
    for fused, activation in ((silu_and_mul, F.silu(gate)), (gelu_and_mul, F.gelu(gate, approximate="tanh"))):
        torch.testing.assert_close(
            fused(gate_up).double(), activation * up, rtol=DTYPES[dtype], atol=DTYPES[dtype]
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "dim"), [(1, 96), (9, 2880), (40, 33)])
def test_clamped_swiglu_and_mul(num_tokens: int, dim: int, dtype: torch.dtype) -> None:
    """Gates far below, which no clamp holds, among them."""
    gate_up = random(num_tokens, 2 * dim, dtype=dtype) * 8
    gate_up[:, :8] *= 100
    expected = ClampedSwigluAndMul(1.702, 7.0)(gate_up.double())
    fused = clamped_swiglu_and_mul(gate_up, 1.702, 7.0).double()
    torch.testing.assert_close(fused, expected, rtol=DTYPES[dtype], atol=DTYPES[dtype])
    assert expected.abs().max() > 8 * 7 * 0.99
