"""Products with norm, gate and residual in the same launch equal their parts, computed in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed, so its kernels cannot run")

from engine.kernels.products import fused_product
from engine.kernels.products.fused_heads import project_heads, serves_heads
from engine.kernels.products.fused_product import Tile, linear_add, norm_gate, norm_linear
from engine.layers.rotary import RotaryEmbedding, apply_rotary
from engine.layers.rotary_scaling import Rope
from tests.engine.paged import DEVICE

# One rounding of a result of a few units in each dtype; the interpreter rounds bfloat16 towards zero.
DTYPES = {torch.float32: 2e-5, torch.bfloat16: 4e-2}
ROWS = [1, 3, 17, 64, 130]
SIZES = [(48, 40), (200, 96), (64, 33)]  # in and out, multiples of a tile and not
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


def test_each_program_gives_its_own_sum_of_squares() -> None:
    """Which the next product adds up."""
    weight, _ = weights(200, 48, torch.float32)
    x, residual = (random(20, n, dtype=torch.float32, seed=n) for n in (48, 200))
    total, squares = linear_add(x, weight, None, residual)
    assert squares.shape == (20, 4)
    ends = [total[:, i : i + 64].double().square().sum(1) for i in range(0, 200, 64)]
    torch.testing.assert_close(squares.double(), torch.stack(ends, 1), rtol=1e-5, atol=1e-6)
    wide, _ = weights(96, 200, torch.float32)
    close(norm_linear(total, squares, EPS, wide, None), F.linear(normed(total), wide.double()))


def head_normed(heads: Tensor, weight: Tensor | None) -> Tensor:
    """[rows, heads, dim], float64."""
    if weight is None:
        return heads
    return heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + EPS) * weight.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_norms", [True, False])
@pytest.mark.parametrize("num_rows", [1, 17, 70])
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


def test_heads_are_projected_whole_where_there_are_rows_for_it() -> None:
    """And where they turn as a whole: no part of a head, and no head that is padded to a power of two."""
    assert [serves_heads(rows, 128, 128) for rows in (64, 65, 256)] == [False, True, True]
    assert not serves_heads(256, 128, 64)
    assert not serves_heads(256, 96, 96)


@pytest.mark.parametrize(
    "tile", [Tile(16, 32, 128, 4, 4), Tile(64, 16, 64, 4, 4), Tile(128, 32, 64, 8, 4)], ids=str
)
def test_tiles_of_a_gpu_give_the_same(tile: Tile, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's own are larger."""
    monkeypatch.setattr(fused_product, "choose_tile", lambda *args, **options: tile)
    test_norm_gate(70, 200, 96, torch.float32)
    test_linear_add(150, 136, 96, torch.float32)


def test_no_rows_launch_nothing() -> None:
    """A step of which no row samples ends like this."""
    weight, _ = weights(40, 48, torch.float32)
    total, squares = linear_add(torch.empty(0, 48), weight, None, torch.empty(0, 40))
    assert total.shape == (0, 40)
    assert len(norm_linear(total, squares, EPS, weight[:, :40].contiguous(), None)) == 0


def test_large_weights_with_many_rows_stay_with_the_vendors_product() -> None:
    small, large = (torch.empty(rows, 4096, device="meta") for rows in (1024, 24576))
    assert [fused_product.serves(rows, small) for rows in (1, 64, 256, 257)] == [True, True, True, False]
    assert [fused_product.serves(rows, large) for rows in (1, 64, 65)] == [True, True, False]


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("out", [1024, 3072, 4096, 6144, 12288])
def test_programs_fill_a_gpu_once(out: int, gated: bool) -> None:
    """Of a decode step of 256 rows: no wave of programs leaves more than three tenths of it idle."""
    tile = fused_product._choose_tile(256, out, gated)
    programs = -(-256 // tile.rows) * -(-out // tile.columns)
    waves = programs / fused_product.PROCESSORS
    assert waves / -(-programs // fused_product.PROCESSORS) > 0.7
