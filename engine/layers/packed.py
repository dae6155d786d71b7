"""Weights in oneDNN's own layout: linear layers on x86 CPUs, float32 and, where they multiply it, bfloat16.

F.linear packs the weight anew in every call, which at the few rows of a decode step costs as much as the
product itself. Packed once, a layer of q54m took 0.5 to 0.6 times F.linear's time at 8 and 16 rows, 0.8 at
64 and more (AMD EPYC, AVX-512). A row's result is the same bits in a batch of any size but, measured there
in float32, one row of more than 1,024 inputs, which oneDNN sums in another order when it is alone.
"""

from __future__ import annotations

import functools
import logging
import platform

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.cpu_kernels.processor import multiplies_bfloat16

TYPICAL_ROWS = 256  # a hint of how many rows the weight will meet; any number is served
#: Of the check's products, which are near 7: relative to them, and beside that. float32 errs by 1e-5,
#: bfloat16 by half its last digit, which is 2**-7.
LARGEST_ERROR = {torch.float32: (0.0, 1e-3), torch.bfloat16: (2**-8, 1e-2)}

logger = logging.getLogger(__name__)


def pack_weight(weight: nn.Parameter) -> nn.Parameter:
    """Return the weight [out, in] as `linear` is fastest with it: packed, or as it is where that is no gain.

    A packed parameter has the layout torch._mkldnn and its original's shape; `to_dense()` gives it back.
    """
    if weight.device.type != "cpu" or weight.dtype not in LARGEST_ERROR or not _can_pack(weight.dtype):
        return weight
    return nn.Parameter(_pack(weight.data), requires_grad=False)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b with a weight from `pack_weight`. x: [rows, in] -> [rows, out]."""
    if not weight.is_mkldnn:
        return F.linear(x, weight, bias)
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product


def _pack(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, TYPICAL_ROWS)
    return packed


@functools.cache
def _can_pack(dtype: torch.dtype) -> bool:
    """Whether this torch has the ops, which are not documented, and they agree with F.linear here.

    In bfloat16 they are held against the float32 products of the same numbers.
    """
    if platform.machine() not in ("x86_64", "AMD64") or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype == torch.bfloat16 and not multiplies_bfloat16():
        return False
    generator = torch.Generator().manual_seed(0)
    shapes = ((7, 48), (40, 48), (40,))
    x, weight, bias = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    try:
        packed = _pack(weight)
        products = [linear(x[:rows], packed, bias) for rows in (0, 1, 7)]
    except (AttributeError, RuntimeError, TypeError) as error:
        problem = repr(error)
    else:
        expected = F.linear(x.float(), weight.float(), bias.float())
        rtol, atol = LARGEST_ERROR[dtype]
        if all(torch.allclose(p.float(), expected[: len(p)], rtol=rtol, atol=atol) for p in products):
            return True
        problem = "they differ from torch's own linear layer"
    shown = str(dtype).removeprefix("torch.")
    logger.warning("oneDNN's packed linear layers of %s are not used, which is slower: %s", shown, problem)
    return False
