"""Products in 8 bits: weights are quantized at load, activations at each product."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from engine.cpu_kernels.processor import is_x86, processor_flags
from engine.errors import ConfigError

LARGEST = 127
ZERO = 128  # of activations, which oneDNN multiplies as bytes from 1 to 255
# A row of zeros has a scale too, by which 127 can be divided.
SMALLEST_MAGNITUDE = 2.0**-100
FLAGS = frozenset({"avx512_vnni", "avx_vnni", "amx_int8"})

QuantizeRows = Callable[[Tensor], tuple[Tensor, Tensor]]


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize x: [rows, dim], float32 or bfloat16 -> ([rows, dim] uint8, [rows, 1] float32), row by row.

    (bytes - ZERO) * scales differs from x by at most half a scale. If a row has NaN or infinity, its scale is that.
    """
    x = x.float()
    largest = x.abs().amax(1, keepdim=True).clamp_min(SMALLEST_MAGNITUDE)
    # LARGEST / largest would round twice
    levels = (x * largest.new_tensor(LARGEST).div(largest)).round_()
    return levels.add_(ZERO).to(torch.uint8), largest / LARGEST


def quantize_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize a weight: [out, in] -> ([out, in] int8, [out] float32), each output channel by itself."""
    levels, scales = quantize_rows(weight)
    return (levels.to(torch.int16) - ZERO).to(torch.int8), scales.squeeze(1)


class Int8Product(nn.Module):
    """x W^T + b with W in int8, packed by oneDNN. Each call quantizes its x."""

    def __init__(self, weight: Tensor, quantize: QuantizeRows) -> None:
        """Quantize a weight [out, in], float32 or bfloat16, which is not kept."""
        super().__init__()
        levels, scales = quantize_weight(weight)
        self.packed = nn.Parameter(
            torch.ops.onednn.qlinear_prepack(levels, None), requires_grad=False
        )
        self.scales = nn.Parameter(scales, requires_grad=False)
        self.zeros = torch.zeros(len(scales), dtype=torch.int32)  # the op wants zero points of W
        self.quantize = quantize

    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply x [rows, in] -> [rows, out], in x's dtype; sums and scales are float32."""
        if len(x) == 0:
            return x.new_empty(0, len(self.scales))
        levels, scales = self.quantize(x)
        product: Tensor = torch.ops.onednn.qlinear_pointwise(
            levels, 1.0, ZERO, self.packed, self.scales, self.zeros, None,
            1.0, 0, torch.float32, "none", [], "",
        )  # fmt: skip
        if bias is not None:
            return product.mul_(scales).add_(bias).to(x.dtype)
        return torch.mul(product, scales, out=torch.empty(product.shape, dtype=x.dtype))


def check_int8() -> None:
    """Raise ConfigError if Int8Product does not work with this processor and this torch."""
    refusal = "quantization='int8' cannot be used"
    if not is_x86() or FLAGS.isdisjoint(processor_flags()):
        raise ConfigError(
            f"{refusal}: this processor has none of {', '.join(sorted(FLAGS))}, and would round or be slow; "
            "leave it out"
        )
    ones = torch.ones(8, 8)
    try:
        product = Int8Product(ones, quantize_rows)(ones, None)
    except (AttributeError, RuntimeError, TypeError) as error:
        raise ConfigError(
            f"{refusal}: torch {torch.__version__} has no such product ({error!r})"
        ) from error
    if not torch.allclose(product, torch.tensor(8.0)):
        raise ConfigError(
            f"{refusal}: torch {torch.__version__} gives another product than it should"
        )
