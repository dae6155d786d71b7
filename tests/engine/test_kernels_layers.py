"""Fused layer kernels equal the layers they stand in for, computed in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton", reason="triton is not installed, so its kernels cannot run")

from engine.kernels.rms_norm import add_rms_norm
from engine.kernels.rotary import norm_and_rotate
from engine.kernels.silu_and_mul import silu_and_mul
from engine.layers.rotary import RotaryEmbedding, apply_rotary
from tests.engine.paged import DEVICE

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
@pytest.mark.parametrize("has_norms", [True, False])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(4, 2, 16), (16, 8, 128), (5, 1, 96), (40, 8, 64)]
)
def test_norm_and_rotate(
    heads: int, kv_heads: int, head_dim: int, has_norms: bool, dtype: torch.dtype
) -> None:
    """Queries and keys as views of one merged projection, at positions far apart."""
    merged = random(19, heads + 2 * kv_heads, head_dim, dtype=dtype)
    query, key = merged[:, :heads], merged[:, heads : heads + kv_heads]
    norms = (
        (random(head_dim, dtype=dtype, seed=1), random(head_dim, dtype=dtype, seed=2)) if has_norms else None
    )
    rotary = RotaryEmbedding(head_dim, 3000, 500.0, dtype=dtype, device=DEVICE)
    rotation = rotary(torch.arange(19, device=DEVICE) * 150)
    wide = [part.double() for part in rotation]
    for i, (got, x) in enumerate(
        zip(norm_and_rotate(query, key, rotation, norms, 1e-5), (query, key), strict=True)
    ):
        x = x.double() if norms is None else norm(x.double(), norms[i].double(), 1e-5)
        expected = apply_rotary(x, *wide)
        torch.testing.assert_close(got.double(), expected, rtol=DTYPES[dtype], atol=DTYPES[dtype])
        assert got.is_contiguous()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "dim"), [(1, 96), (9, 3072), (40, 33)])
def test_silu_and_mul(num_tokens: int, dim: int, dtype: torch.dtype) -> None:
    gate_up = random(num_tokens, 2 * dim, dtype=dtype) * 4
    gate, up = gate_up.double().chunk(2, dim=-1)
    torch.testing.assert_close(
        silu_and_mul(gate_up).double(), F.silu(gate) * up, rtol=DTYPES[dtype], atol=DTYPES[dtype]
    )
