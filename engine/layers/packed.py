"""Weights in oneDNN's own layout: float32 linear layers on x86 CPUs.

F.linear packs the weight anew in every call, which at the few rows of a decode step costs as much as the
product itself. Packed once, a layer of q54m took 0.5 to 0.6 times F.linear's time at 8 and 16 rows, 0.8 at
64 and more (AMD EPYC, AVX-512). A row's result is the same bits in a batch of any size, too.
"""

from __future__ import annotations

import functools
import logging
import platform

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TYPICAL_ROWS = 256  # a hint of how many rows the weight will meet; any number is served
LARGEST_ERROR = 1e-3  # of the check's products, whose float32 error is 1e-5

logger = logging.getLogger(__name__)


def pack_weight(weight: nn.Parameter) -> nn.Parameter:
    """Return the weight [out, in] as `linear` is fastest with it: packed, or as it is where that is no gain.

    A packed parameter has the layout torch._mkldnn and its original's shape; `to_dense()` gives it back.
    """
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or not _can_pack():
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
def _can_pack() -> bool:
    """Whether this torch has the ops, which are not documented, and they agree with F.linear here."""
    if platform.machine() not in ("x86_64", "AMD64") or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(shape, generator=generator) for shape in ((7, 48), (40, 48), (40,)))
    try:
        packed = _pack(weight)
        products = [linear(x[:rows], packed, bias) for rows in (0, 1, 7)]
    except (AttributeError, RuntimeError, TypeError) as error:
        problem = repr(error)
    else:
        expected = F.linear(x, weight, bias)
        if all(torch.allclose(product, expected[: len(product)], atol=LARGEST_ERROR) for product in products):
            return True
        problem = "they differ from torch's own linear layer"
    logger.warning("oneDNN's packed linear layers are not used, the CPU path is slower: %s", problem)
    return False
