"""The CPU's fused layer kernels equal the layers they stand in for, computed in float64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("numba", reason="numba is not installed, so the CPU kernels cannot be compiled")

from engine.cpu_kernels.elementwise import (
    add_rms_norm,
    gelu_and_mul,
    norm_and_rotate,
    rms_norm,
    silu_and_mul,
    store_kv,
)
from engine.layers.rotary import apply_rotary

CLOSE = {"rtol": 4e-6, "atol": 4e-6}


@pytest.fixture(params=[1, 2], autouse=True)
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(1)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rotation_of(num_tokens: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [tokens, 1, dim], cut out of one table as RotaryEmbedding does it."""
    angles = (random(num_tokens, 1, dim // 2, seed=9) * 1000).repeat(1, 1, 2)
    cos, sin = torch.stack((angles.cos(), angles.sin()), 1).unbind(1)
    return cos, sin


@pytest.mark.parametrize(("num_tokens", "dim"), [(0, 48), (1, 48), (7, 1024), (33, 40), (65, 1)])
def test_add_rms_norm(num_tokens: int, dim: int) -> None:
    x, residual, weight = random(num_tokens, dim), random(num_tokens, dim, seed=1), random(dim, seed=2)
    normed, total = add_rms_norm(x, residual, weight, 1e-3)
    assert torch.equal(total, x + residual)
    expected = norm(total.double(), weight.double(), 1e-3)
    torch.testing.assert_close(normed.double(), expected, **CLOSE)


@pytest.mark.parametrize("dim", [48, 1024, 33])
def test_rms_norm(dim: int) -> None:
    """Of rows that lie apart, as a part of a merged projection does, and of heads."""
    weight = random(dim, seed=2)
    for x in (random(0, dim), random(1, dim), random(37, 3 * dim)[:, dim : 2 * dim], random(9, 4, dim)):
        normed = rms_norm(x, weight, 1e-3)
        torch.testing.assert_close(normed.double(), norm(x.double(), weight.double(), 1e-3), **CLOSE)
        assert normed.is_contiguous()


@pytest.mark.parametrize("has_norms", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 16), (5, 1, 96), (40, 8, 128)])
def test_norm_and_rotate(heads: int, kv_heads: int, head_dim: int, has_norms: bool) -> None:
    """Queries and keys as views of one merged projection, at random positions."""
    merged = random(19, heads + 2 * kv_heads, head_dim)
    query, key = merged[:, :heads], merged[:, heads : heads + kv_heads]
    norms = (random(head_dim, seed=1), random(head_dim, seed=2)) if has_norms else None
    rotation = rotation_of(19, head_dim)
    turned = norm_and_rotate(query, key, rotation, norms, 1e-5)
    for i, (got, x) in enumerate(zip(turned, (query, key), strict=True)):
        wide = x.double() if norms is None else norm(x.double(), norms[i].double(), 1e-5)
        expected = apply_rotary(wide, *[part.double() for part in rotation])
        torch.testing.assert_close(got.double(), expected, **CLOSE)
        assert got.is_contiguous()


@pytest.mark.parametrize("per_head", [True, False], ids=["weight_per_head", "one_weight"])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(16, 4), (80, 32), (96, 96), (40, 2)])
def test_a_part_of_each_head_is_rotated(head_dim: int, rotary_dim: int, per_head: bool) -> None:
    """The rest passes, normalised with the part; each head may have a norm's weight of its own."""
    query, key = random(19, 6, head_dim)[:, :5], random(19, 2, head_dim, seed=1)
    shapes = [(5, head_dim), (2, head_dim)] if per_head else [(head_dim,)] * 2
    weights = (random(*shapes[0], seed=2), random(*shapes[1], seed=3))
    rotation = rotation_of(19, rotary_dim)
    for norms in (weights, None):
        turned = norm_and_rotate(query, key, rotation, norms, 1e-5)
        for i, (got, x) in enumerate(zip(turned, (query, key), strict=True)):
            wide = x.double() if norms is None else norm(x.double(), norms[i].double(), 1e-5)
            expected = apply_rotary(wide, *[part.double() for part in rotation])
            assert torch.equal(expected[..., rotary_dim:], wide[..., rotary_dim:])
            torch.testing.assert_close(got.double(), expected, **CLOSE)


@pytest.mark.parametrize("gelu", [True, False], ids=["gelu", "silu"])
@pytest.mark.parametrize(("num_tokens", "dim"), [(1, 96), (9, 3072), (40, 33)])
def test_gate_and_mul(num_tokens: int, dim: int, gelu: bool) -> None:
    """From gates that shut, over the range that counts, to gates wide open."""
    gate_up = random(num_tokens, 2 * dim) * 4
    gate_up[0, :6] = torch.tensor([-1e9, -200.0, -88.0, 88.0, 200.0, 1e9])
    gate, up = gate_up.double().chunk(2, dim=-1)
    if gelu:
        expected = F.gelu(gate, approximate="tanh") * up
        torch.testing.assert_close(gelu_and_mul(gate_up).double(), expected, **CLOSE)
    else:
        torch.testing.assert_close(silu_and_mul(gate_up).double(), F.silu(gate) * up, **CLOSE)


def test_store_kv_skips_padding_and_touches_nothing_else() -> None:
    """Views with gaps into random slots; a slot of -1 is no slot, least of all the last one."""
    kv = random(21, 3, 2, 24)
    keys, values = kv[:, 0], kv[:, 2]
    slots = torch.randperm(6 * 7, generator=torch.Generator().manual_seed(1))[:21]
    slots[slots == 41] = -1
    slots[::4] = -1
    caches = [torch.full((6, 7, 2, 24), float("nan")) for _ in range(2)]
    store_kv(keys, values, *caches, slots)
    for given, cache in zip((keys, values), caches, strict=True):
        expected = torch.full((42, 2, 24), float("nan"))
        expected[slots[slots >= 0]] = given[slots >= 0]
        torch.testing.assert_close(cache.flatten(0, 1), expected, rtol=0, atol=0, equal_nan=True)
