"""The fused layer kernels, for CPUs and for GPUs, equal the layers they stand in for, computed in float64."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.layers.rotary import apply_rotary
from engine.layers.stream import ClampedSwigluAndMul
from tests.engine.paged import DEVICE

CPU_CLOSE = {
    torch.float32: {"rtol": 4e-6, "atol": 4e-6},
    torch.bfloat16: {"rtol": 2**-8 + 4e-6, "atol": 4e-6},
}
GPU_CLOSE = {
    torch.float32: {"rtol": 4e-6, "atol": 4e-6},
    torch.bfloat16: {"rtol": 4e-2, "atol": 4e-2},
}
UNTOUCHED = 77.0

both_dtypes = pytest.mark.parametrize("dtype", CPU_CLOSE, ids=str)


def numba_kernels() -> SimpleNamespace:
    pytest.importorskip(
        "numba", reason="numba is not installed, so the CPU kernels cannot be compiled"
    )
    from engine.cpu_kernels import elementwise

    return SimpleNamespace(**vars(elementwise), device=torch.device("cpu"), close=CPU_CLOSE)


def triton_kernels() -> SimpleNamespace:
    pytest.importorskip("triton", reason="triton is not installed, so its kernels cannot run")
    from engine.kernels import rms_norm
    from engine.kernels.attention import kv_store, rotary
    from engine.kernels.products import gate_and_mul

    found: dict[str, Any] = {}
    for module in (gate_and_mul, kv_store, rms_norm, rotary):
        found |= vars(module)
    return SimpleNamespace(**found, device=DEVICE, close=GPU_CLOSE)


@pytest.fixture(params=["one thread", "two threads", "triton"])
def kernels(request: pytest.FixtureRequest) -> Iterator[SimpleNamespace]:
    torch.set_num_threads(2 if request.param == "two threads" else 1)
    yield triton_kernels() if request.param == "triton" else numba_kernels()
    torch.set_num_threads(1)


def random(
    kernels: SimpleNamespace, *shape: int, seed: int = 0, dtype: torch.dtype = torch.float32
) -> Tensor:
    return (
        torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        .to(dtype)
        .to(kernels.device)
    )


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rotation_of(
    kernels: SimpleNamespace, num_tokens: int, dim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosines and sines [tokens, 1, dim], cut out of one table as RotaryEmbedding does it."""
    angles = (random(kernels, num_tokens, 1, dim // 2, seed=9) * 1000).repeat(1, 1, 2)
    cos, sin = torch.stack((angles.cos(), angles.sin()), 1).to(dtype).unbind(1)
    return cos, sin


@both_dtypes
@pytest.mark.parametrize(("num_tokens", "dim"), [(1, 48), (33, 40), (7, 1)])
def test_add_rms_norm(
    kernels: SimpleNamespace, num_tokens: int, dim: int, dtype: torch.dtype
) -> None:
    """The norm is of the sum as it is rounded; a model may keep its norms' weights in float32."""
    x = random(kernels, num_tokens, dim, dtype=dtype)
    residual = random(kernels, num_tokens, dim, seed=1, dtype=dtype)
    for weight in (random(kernels, dim, seed=2, dtype=dtype), random(kernels, dim, seed=2)):
        normed, total = kernels.add_rms_norm(x, residual, weight, 1e-3)
        torch.testing.assert_close(total, x + residual, **kernels.close[dtype])
        expected = norm(total.double(), weight.double(), 1e-3)
        assert normed.dtype == dtype
        torch.testing.assert_close(normed.double(), expected, **kernels.close[dtype])


@both_dtypes
@pytest.mark.parametrize("dim", [48, 33])
def test_rms_norm(kernels: SimpleNamespace, dim: int, dtype: torch.dtype) -> None:
    """Of rows that lie apart, as a part of a merged projection does, and of heads."""
    weight = random(kernels, dim, seed=2, dtype=dtype)
    merged = random(kernels, 37, 3 * dim, dtype=dtype)
    for x in (merged[:, dim : 2 * dim], random(kernels, 9, 4, dim, dtype=dtype)):
        normed = kernels.rms_norm(x, weight, 1e-3)
        expected = norm(x.double(), weight.double(), 1e-3)
        torch.testing.assert_close(normed.double(), expected, **kernels.close[dtype])
        assert normed.is_contiguous()


@both_dtypes
@pytest.mark.parametrize("has_norms", [True, False])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "rotary_dim"),
    [(4, 2, 16, 16), (5, 1, 96, 96), (5, 2, 80, 32)],
)
def test_norm_rotate_and_store(
    kernels: SimpleNamespace,
    heads: int,
    kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    has_norms: bool,
    dtype: torch.dtype,
) -> None:
    """Views of one merged projection, to slots in any order, some of them -1; what does not turn passes."""
    weights = [random(kernels, head_dim, dtype=dtype, seed=i) for i in range(2)]
    merged = random(kernels, 19, heads + 2 * kv_heads, head_dim, dtype=dtype)
    query, key, value = merged.split((heads, kv_heads, kv_heads), dim=1)
    rotation = rotation_of(kernels, 19, rotary_dim, dtype)
    slots = torch.randperm(24, generator=torch.Generator().manual_seed(1))[:19].to(kernels.device)
    slots[2::5] = -1
    kept = slots >= 0
    # a block before the first, for what a slot of -1 would hit
    pools = [
        torch.full((7, 4, kv_heads, head_dim), UNTOUCHED, dtype=dtype, device=kernels.device)
        for _ in "kv"
    ]
    turned = kernels.norm_rotate_and_store(
        query, key, value, rotation, tuple(weights) if has_norms else None, 1e-5,
        (*(pool[1:] for pool in pools), None), slots,
    )  # fmt: skip
    assert turned.is_contiguous()
    keys, values = (pool[1:].flatten(0, 1) for pool in pools)
    for got, x, weight, rows in (
        (turned, query, weights[0], slice(None)),
        (keys[slots[kept]], key, weights[1], kept),
    ):
        wide = norm(x.double(), weight.double(), 1e-5) if has_norms else x.double()
        expected = apply_rotary(wide, *(part.double() for part in rotation))[rows]
        torch.testing.assert_close(got.double(), expected, **kernels.close[dtype])
    assert torch.equal(values[slots[kept]], value[kept])
    others = torch.ones(24, dtype=torch.bool, device=kernels.device).index_fill_(
        0, slots[kept], False
    )
    for pool, stored in zip(pools, (keys, values), strict=True):
        assert (stored[others] == UNTOUCHED).all()
        assert (pool[0] == UNTOUCHED).all()


@both_dtypes
@pytest.mark.parametrize(("num_tokens", "dim"), [(1, 96), (40, 33)])
def test_gate_and_mul(
    kernels: SimpleNamespace, num_tokens: int, dim: int, dtype: torch.dtype
) -> None:
    """From gates that shut, over the range that counts, to gates wide open."""
    gate_up = random(kernels, num_tokens, 2 * dim, dtype=dtype) * 4
    gate_up[0, :6] = torch.tensor([-1e9, -200.0, -88.0, 88.0, 200.0, 1e9])
    gate, up = gate_up.double().chunk(2, dim=-1)
    gelu, silu = F.gelu(gate, approximate="tanh"), F.silu(gate)
    for fused, activation in ((kernels.gelu_and_mul, gelu), (kernels.silu_and_mul, silu)):
        with np.errstate(over="ignore"):  # in the interpreter: of gates that shut
            found = fused(gate_up).double()
        torch.testing.assert_close(found, activation * up, **kernels.close[dtype])


@both_dtypes
def test_clamped_swiglu_and_mul(dtype: torch.dtype) -> None:
    """Gates far below, which no clamp holds, among them."""
    kernels = triton_kernels()
    gate_up = random(kernels, 40, 66, dtype=dtype) * 8
    gate_up[:, :8] *= 100
    expected = ClampedSwigluAndMul(1.702, 7.0)(gate_up.double())
    fused = kernels.clamped_swiglu_and_mul(gate_up, 1.702, 7.0).double()
    torch.testing.assert_close(fused, expected, **kernels.close[dtype])


@both_dtypes
def test_store_kv_skips_padding_and_touches_nothing_else(dtype: torch.dtype) -> None:
    """Views with gaps into random slots; a slot of -1 is no slot, least of all the last one."""
    kernels = triton_kernels()
    kv = random(kernels, 21, 6, 24, dtype=dtype)
    keys, values = kv[:, :2], kv[:, 4:]
    slots = torch.randperm(42, generator=torch.Generator().manual_seed(1))[:21].to(kernels.device)
    slots[slots == 41] = -1
    slots[::4] = -1
    caches = [
        torch.full((6, 7, 2, 24), UNTOUCHED, dtype=dtype, device=kernels.device) for _ in "kv"
    ]
    kernels.store_kv(keys, values, (*caches, None), slots)
    for given, cache in zip((keys, values), caches, strict=True):
        expected = torch.full((42, 2, 24), UNTOUCHED, dtype=dtype, device=kernels.device)
        expected[slots[slots >= 0]] = given[slots >= 0]
        assert torch.equal(cache.flatten(0, 1), expected)


def test_numbers_are_rounded_to_bfloat16_as_torch_does_it() -> None:
    """Every upper half of a float32, with lower halves below, at and above the middle; NaN stays NaN."""
    numba = pytest.importorskip("numba", reason="numba is not installed")
    from engine.cpu_kernels.scalars import BFLOAT16, narrow

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
