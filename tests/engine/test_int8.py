"""int8 weights by name: exact products of rounded numbers, each row by itself; refused where not built."""

import logging
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine import ConfigError, Engine, EngineConfig, SamplingParams
from engine.attention import load_backend
from engine.cpu_kernels.processor import processor_flags
from engine.layers import int8
from engine.layers.int8 import ZERO, Int8Product, quantize_rows, quantize_weight

DTYPES = (torch.float32, torch.bfloat16)
needs_int8 = pytest.mark.skipif(
    int8.FLAGS.isdisjoint(processor_flags()),
    reason="this processor does not sum products of int8 in 32 bits",
)


def uneven(rows: int, dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows of very different sizes, one of them zero: one scale for all would round most of them away."""
    generator = torch.Generator().manual_seed(rows * dim)
    sizes = 10.0 ** torch.linspace(-4, 3, rows).unsqueeze(1)
    numbers = torch.randn(rows, dim, generator=generator) * sizes
    numbers[rows // 2] = 0
    return numbers.to(dtype)


def unquantized(levels: Tensor, scales: Tensor) -> Tensor:
    return (levels.double() - ZERO) * scales.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (7, 48), (65, 257)])
def test_each_row_is_rounded_by_its_own_scale(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = uneven(*shape, dtype)
    levels, scales = quantize_rows(x)
    error = (unquantized(levels, scales) - x.double()).abs()
    assert (error <= scales * 0.5001).all(), "half a level"
    largest = x.double().abs().amax(1, keepdim=True)
    assert torch.allclose(scales.double()[largest > 0] * 127, largest[largest > 0], rtol=1e-6)
    assert levels.min() >= 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (7, 48), (65, 257)])
def test_the_compiled_kernel_gives_the_same_bits(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    """Also of rows that lie apart, of zeros, of halves between two levels, and of NaN and infinity."""
    kernels = load_backend("cpu", torch.device("cpu"), dtype).layer_kernels
    assert kernels is not None
    assert kernels.quantize_rows is not None
    x = torch.cat([uneven(*shape, dtype), uneven(*shape, dtype)], 1)[:, : shape[1]]
    halves = (torch.arange(shape[1]) + 0.5).clamp(max=127).expand(*shape).to(dtype)
    for each in (x, halves):
        for ours, reference in zip(kernels.quantize_rows(each), quantize_rows(each), strict=True):
            assert torch.equal(ours, reference)
    broken = x.clone()
    broken[0, 0], broken[-1, -1] = torch.inf, torch.nan
    ours, reference = kernels.quantize_rows(broken)[1], quantize_rows(broken)[1]
    torch.testing.assert_close(ours, reference, rtol=0, atol=0, equal_nan=True)


@needs_int8
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    ("rows", "shape"), [(0, (8, 4)), (1, (1, 16)), (9, (130, 257)), (70, (17, 5))]
)
def test_a_product_is_that_of_the_rounded_numbers(
    rows: int, shape: tuple[int, int], biased: bool, dtype: torch.dtype
) -> None:
    """Against float64, within what one rounding of sum and result may err: rows of weights and of x have
    scales of their own, so that the smallest channel of the smallest token is as exact as the largest."""
    weight, x = uneven(*shape, dtype), uneven(rows + 1, shape[1], dtype)[:rows]
    bias = torch.randn(shape[0]).to(dtype) if biased else None
    product = Int8Product(weight, quantize_rows)(x, bias)
    assert product.dtype == dtype
    assert product.shape == (rows, shape[0])
    if rows == 0:
        return
    columns, column_scales = quantize_weight(weight)
    terms = unquantized(*quantize_rows(x)), columns.double() * column_scales.double().unsqueeze(1)
    exact = terms[0] @ terms[1].T
    size = terms[0].abs() @ terms[1].abs().T
    if bias is not None:
        exact, size = exact + bias.double(), size + bias.double().abs()
    digit = 2**-8 if dtype == torch.bfloat16 else 2**-22
    assert ((product.double() - exact).abs() <= size * digit + 1e-30).all()


@needs_int8
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engine_quantizes_every_linear_layer_and_says_so(
    folder: Path, dtype: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = EngineConfig(
        str(folder), dtype=dtype, device="cpu", kv_cache_bytes=2**20, quantization="int8"
    )
    with caplog.at_level(logging.INFO), Engine(config) as engine:
        model = engine._open_runner().model
        # a tied head has a copy of its own only where this processor packs it
        weights = model.named_parameters(remove_duplicate=False)
        left = {name.rpartition(".")[0] for name, weight in weights if weight.dim() == 2}
        num_layers = len(model.model.layers)
        completions = engine.generate([[5, 6, 7]] * 3, SamplingParams(max_tokens=4, temperature=0))
    assert f"int8: the weights of {4 * num_layers} linear layers" in caplog.text
    assert {name for name in left if not name.endswith("instead")} == {
        "lm_head",
        "model.embed_tokens",
    }
    assert len({tuple(completion.token_ids) for completion in completions}) == 1


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            {"quantization": "int4"},
            "quantization='int4' is not known: use 'int8' or leave it unset",
        ),
        (
            {"quantization": "int8", "tensor_parallel_size": 2},
            "not built for tensor_parallel_size=2",
        ),
    ],
)
def test_what_no_engine_has_is_refused_by_the_configuration(
    settings: dict[str, object], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        EngineConfig("m", **settings)  # type: ignore[arg-type]
