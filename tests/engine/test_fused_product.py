"""Products with norm, gate and residual in the same launch equal their parts, computed in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed, so its kernels cannot run")

from engine.kernels.products.fused_product import linear_add, norm_gate, norm_linear
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
