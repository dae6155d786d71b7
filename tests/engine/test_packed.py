"""Packed linear weights: the same products, no second copy, and plain torch where they do not serve."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from engine import Engine, EngineConfig
from engine.layers import onednn
from engine.layers.onednn import linear, pack_weight

needs_packing = pytest.mark.skipif(
    not onednn._can_pack(torch.float32), reason="this machine or torch cannot pack"
)
both_dtypes = pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        pytest.param(
            torch.bfloat16,
            marks=pytest.mark.skipif(
                not onednn._can_pack(torch.bfloat16),
                reason="this processor does not multiply bfloat16",
            ),
        ),
    ],
    ids=str,
)
CLOSE = {
    torch.float32: {"rtol": 1e-5, "atol": 2e-4},
    torch.bfloat16: {"rtol": 2**-8 + 1e-5, "atol": 2e-4},
}


def random_weight(
    out_features: int, in_features: int, dtype: torch.dtype = torch.float32
) -> nn.Parameter:
    generator = torch.Generator().manual_seed(out_features)
    weight = torch.randn(out_features, in_features, generator=generator)
    return nn.Parameter(weight.to(dtype), requires_grad=False)


@needs_packing
@both_dtypes
@pytest.mark.parametrize("shape", [(17, 5), (130, 257)])
@pytest.mark.parametrize("rows", [0, 1, 9, 70])
def test_a_packed_weight_gives_the_same_product(
    shape: tuple[int, int], rows: int, dtype: torch.dtype
) -> None:
    """Odd sizes, no row at all, bias or none, and rows with gaps between them; rounded once."""
    weight, bias = random_weight(*shape, dtype), torch.randn(shape[0]).to(dtype)
    x = torch.randn(rows, shape[1] + 3).to(dtype)[:, 3:]
    once = pack_weight(weight)
    assert once.is_mkldnn
    assert once.shape == weight.shape
    for b in (None, bias):
        expected = F.linear(x.double(), weight.double(), None if b is None else b.double())
        product = linear(x, once, b)
        assert product.dtype == dtype
        torch.testing.assert_close(product.double(), expected, **CLOSE[dtype])


@needs_packing
@both_dtypes
def test_a_row_has_the_same_bits_in_every_batch(dtype: torch.dtype) -> None:
    weight = pack_weight(random_weight(96, 48, dtype))
    x = torch.randn(65, 48).to(dtype)
    whole = linear(x, weight)
    for rows in (1, 2, 15, 16, 33):
        assert torch.equal(linear(x[:rows], weight), whole[:rows])


@needs_packing
@both_dtypes
def test_the_engine_packs_every_linear_layer_and_keeps_no_raw_copy(
    folder: Path, dtype: torch.dtype
) -> None:
    """Tied here: the embedding keeps its table, the head packs its own."""
    name = str(dtype).removeprefix("torch.")
    with Engine(EngineConfig(str(folder), dtype=name, kv_cache_bytes=2**20)) as engine:
        weights = dict(engine._open_runner().model.named_parameters())
    is_packed = {name: weight.is_mkldnn for name, weight in weights.items() if weight.dim() == 2}
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in is_packed if is_packed[name]} == {
        "qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head",
    }  # fmt: skip
    assert [name for name in is_packed if not is_packed[name]] == ["model.embed_tokens.weight"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_dtypes_stay_as_they_are(dtype: torch.dtype) -> None:
    weight = random_weight(8, 4, dtype)
    assert pack_weight(weight) is weight
    x = torch.ones(3, 4, dtype=dtype)
    assert torch.equal(linear(x, weight), F.linear(x, weight))
