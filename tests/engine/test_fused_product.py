"""Products with norm, gate and residual in the same launch equal their parts, computed in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed, so its kernels cannot run")

from engine.kernels.products.fused_heads import project_heads
from engine.kernels.products.fused_product import linear_add, norm_gate, norm_linear
from engine.layers.rotary import Rope, RotaryEmbedding, apply_rotary
from tests.engine.paged import DEVICE

# One rounding of a result of a few units in each dtype; the interpreter rounds bfloat16 towards zero.
DTYPES = {torch.float32: 2e-5, torch.bfloat16: 4e-2}
ROWS = [3, 70]
SIZES = [(48, 40), (200, 33)]  # in and out, multiples of a tile and not
EPS = 1e-3


def random(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def weights(out: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Weight and bias, for products of a few units."""
    return random(out, width, dtype=dtype, seed=2) * width**-0.5, random(out, dtype=dtype, seed=3)


def parts_of_squares(x: Tensor) -> Tensor:
    """The squares of each row summed in three parts."""
    return torch.stack([part.float().square().sum(1) for part in x.tensor_split(3, dim=1)], 1).contiguous()


def normed(x: Tensor) -> Tensor:
    return x.double() * torch.rsqrt(x.double().square().mean(1, keepdim=True) + EPS)


def close(got: Tensor, expected: Tensor) -> None:
    tolerance = DTYPES[got.dtype]
    torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize(("width", "out"), SIZES)
def test_norm_linear(num_rows: int, width: int, out: int, dtype: torch.dtype) -> None:
    """Rows of very different length, so that no row's scale serves another; with bias and without."""
    weight, bias = weights(out, width, dtype)
    x = random(num_rows, width, dtype=dtype, seed=1) * torch.logspace(-2, 2, num_rows, device=DEVICE)[:, None]
    x = x.to(dtype)
    for each in (bias, None):
        got = norm_linear(x, parts_of_squares(x), EPS, weight, each)
        close(got, F.linear(normed(x), weight.double(), None if each is None else each.double()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize(("width", "out"), SIZES)
def test_norm_gate(num_rows: int, width: int, out: int, dtype: torch.dtype) -> None:
    """By silu with a bias, by gelu without; gates of a few units."""
    weight, bias = weights(2 * out, width, dtype)
    weight = weight * 3
    x = random(num_rows, width, dtype=dtype, seed=1) * 5
    for gelu, each in ((False, bias), (True, None)):
        product = F.linear(normed(x), weight.double(), None if each is None else each.double())
        gate, up = product.chunk(2, dim=1)
        expected = (F.gelu(gate, approximate="tanh") if gelu else F.silu(gate)) * up
        close(norm_gate(x, parts_of_squares(x), EPS, weight, each, gelu=gelu), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize(("width", "out"), SIZES)
def test_linear_add(num_rows: int, width: int, out: int, dtype: torch.dtype) -> None:
    """The sum, and its squares as it is stored; x's rows may lie apart."""
    weight, bias = weights(out, width, dtype)
    x = random(num_rows, 2 * width, dtype=dtype, seed=1)[:, width:]
    residual = random(num_rows, out, dtype=dtype, seed=4)
    for each in (bias, None):
        total, squares = linear_add(x, weight, each, residual)
        product = F.linear(x.double(), weight.double(), None if each is None else each.double())
        close(total, residual.double() + product)
        expected = total.double().square().sum(1)
        torch.testing.assert_close(squares.double().sum(1), expected, rtol=1e-5, atol=1e-6)


def head_normed(heads: Tensor, weight: Tensor | None) -> Tensor:
    """[rows, heads, dim], float64."""
    if weight is None:
        return heads
    return heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + EPS) * weight.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_norms", [True, False])
@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize(
    ("width", "heads", "kv_heads", "head_dim"), [(48, 4, 2, 16), (200, 3, 3, 64), (64, 5, 1, 32)]
)
def test_project_heads(
    width: int, heads: int, kv_heads: int, head_dim: int, num_rows: int, has_norms: bool, dtype: torch.dtype
) -> None:
    """Queries, and keys and values in slots in any order, of which padding has none; a bias without norms."""
    weight, bias = weights((heads + 2 * kv_heads) * head_dim, width, dtype)
    x = random(num_rows, width, dtype=dtype, seed=1) * 5
    norms = tuple(random(head_dim, dtype=dtype, seed=i) for i in (5, 6)) if has_norms else (None, None)
    rotary = RotaryEmbedding(Rope("default", head_dim, 500.0, 3000, {}), 3000, dtype=dtype, device=DEVICE)
    rotation = rotary(torch.arange(num_rows, device=DEVICE) * 41)
    slots = torch.randperm(80, generator=torch.Generator().manual_seed(0))[:num_rows].to(DEVICE)
    slots[-1] = -1
    kept = slots >= 0
    # a block before the first, for what a slot of -1 would hit
    pools = [torch.full((21, 4, kv_heads, head_dim), 77.0, dtype=dtype, device=DEVICE) for _ in range(2)]
    caches = [pool[1:] for pool in pools]
    each = None if has_norms else bias
    got = project_heads(
        x, parts_of_squares(x), EPS, weight, each, rotation, norms if has_norms else None, *caches, slots
    )
    product = F.linear(normed(x), weight.double(), None if each is None else each.double())
    query, key, value = product.view(num_rows, -1, head_dim).split([heads, kv_heads, kv_heads], dim=1)
    wide = [part.double() for part in rotation]
    close(got, apply_rotary(head_normed(query, norms[0]), *wide))
    expected = apply_rotary(head_normed(key, norms[1]), *wide), value
    others = torch.ones(80, dtype=torch.bool, device=DEVICE).index_fill_(0, slots[kept], False)
    for pool, cache, numbers in zip(pools, caches, expected, strict=True):
        close(cache.flatten(0, 1)[slots[kept]], numbers[kept])
        assert (cache.flatten(0, 1)[others] == 77.0).all()
        assert (pool[0] == 77.0).all()
