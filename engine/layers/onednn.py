"""Products with weights in oneDNN's packed layout, where that is faster."""

import functools
import logging

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.cpu_kernels.processor import is_x86, multiplies_bfloat16

TYPICAL_ROWS = 256  # a hint of how many rows the weight will meet; any number is served
PACKED_DTYPES = (torch.float32, torch.bfloat16)

logger = logging.getLogger(__name__)


def pack_weight(weight: nn.Parameter) -> nn.Parameter:
    """Return the weight [out, in] as `linear` is fastest with it: packed by oneDNN, or as it is."""
    if not packs(weight.device, weight.dtype):
        return weight
    return nn.Parameter(_pack(weight.data), requires_grad=False)


def packs(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether `pack_weight` packs weights of that dtype on that device."""
    return device.type == "cpu" and dtype in PACKED_DTYPES and _can_pack(dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + b with a weight from `pack_weight`. x: [rows, in] -> [rows, out]."""
    if not weight.is_mkldnn:
        return F.linear(x, weight, bias)
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product


def _pack(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, TYPICAL_ROWS)
    return packed


@functools.cache
def _can_pack(dtype: torch.dtype) -> bool:
    """Return whether this torch has the undocumented ops, and they are faster on this processor."""
    if not is_x86() or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype == torch.bfloat16 and not multiplies_bfloat16():
        return False
    ones = torch.ones(8, 8, dtype=dtype)
    try:
        return bool((linear(ones, _pack(ones)) == 8).all())
    except (AttributeError, RuntimeError, TypeError) as error:
        dtype_name = str(dtype).removeprefix("torch.")
        logger.warning(
            "oneDNN's packed linear layers of %s are not used, which is slower: %r",
            dtype_name,
            error,
        )
        return False
