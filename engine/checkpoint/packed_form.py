"""The forms in which quantized weights may stay in memory as a checkpoint stores them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.checkpoint.weights import CheckpointTensor
from engine.errors import DamagedWeights

#: The largest magnitude of a code less its zero point, by kind. A kernel reads e2m1 as a float16, which has another
#: bias, and multiplies the scale by 2^14.
LARGEST_CODE = {
    "int4": 15.0, "int8": 255.0, "fp4": 6.0 * 2**14, "fp8": 448.0, "nf4": 1.0, "bnb_fp4": 12.0,
}  # fmt: skip


@dataclass(frozen=True)
class PackedForm:
    """The form in which weights [out, in] may stay in memory as they are stored.

    kind: "int4", "int8", "fp4" (e2m1), "fp8" (e4m3), or bitsandbytes' "nf4" and "bnb_fp4".
    group: the number of a row's columns that share a scale; None if all of them do.
    scale_dtype: a dtype that holds the stored scales exactly.
    """

    kind: str
    group: int | None
    scale_dtype: torch.dtype


@dataclass(frozen=True)
class PackedPart:
    """Some rows and columns of a quantized weight, not unpacked. Each number is (code - zero) * scale.

    codes: [rows, columns] uint8; the code of a float is its bits.  scales: [rows, groups].
    zeros: [rows, groups] uint8; None for codes that are not integers.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None


def check_scales(tensor: CheckpointTensor, scales: Tensor, kind: str) -> None:
    """Raise DamagedWeights unless every scale of `tensor` gives finite weights."""
    if not (scales.float() * LARGEST_CODE[kind]).isfinite().all():
        raise damaged(tensor, "has numbers that are NaN or infinite, or too large")


def damaged(tensor: CheckpointTensor, problem: str) -> DamagedWeights:
    """Return an error that names a tensor and its file."""
    return DamagedWeights(f"{tensor.name!r} in {tensor.path} {problem}; fetch the file again")
