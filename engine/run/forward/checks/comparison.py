"""KernelComparison: runs GPU kernels beside their references, and says where they differ."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from engine.errors import KernelDiffers

#: Two values of a dtype agree when a row's difference is at most this share of the row's length. Tiny models' rounding
#: came to 5e-7 in float32, 0.011 in bfloat16, and 0.09 with an FP8 cache (Triton's interpreter).
TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 4e-2}


class KernelComparison:
    """Runs kernels and their references, and compares what they give."""

    def __init__(
        self, announce: Callable[[str], object], device: torch.device, dtype: torch.dtype
    ) -> None:
        """announce: is told a kernel's name before each launch. dtype: the model's."""
        self._announce = announce
        self._device = device
        self._tolerance = TOLERANCE[dtype]

    def run(
        self,
        name: str,
        kernel: Callable[..., Any],
        reference: Callable[..., Any],
        arguments: Sequence[Any],
        *,
        changed: Sequence[Tensor] = (),
        tolerance: float | None = None,
    ) -> Any:
        """Return kernel(*arguments). Raises KernelDiffers unless reference(*arguments) gives about the same.

        If the kernel returns more tensors than the reference, the further ones are not compared.
        changed: tensors among the arguments, or within them, that both write to. tolerance: 0 asks for equality.
        """
        before = [tensor.clone() for tensor in changed]
        expected = _tensors(reference(*arguments)) + [tensor.clone() for tensor in changed]
        for tensor, value in zip(changed, before, strict=True):
            tensor.copy_(value)

        self._announce(name)
        result = kernel(*arguments)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

        computed = [*_tensors(result)[: len(expected) - len(changed)], *changed]
        limit = self._tolerance if tolerance is None else tolerance
        for index, (value, wanted) in enumerate(zip(computed, expected, strict=True)):
            difference = _difference(value, wanted)
            if not difference <= limit:
                raise KernelDiffers(
                    f"differs from plain torch by {difference:.3g} of a row's length (result {index}), "
                    f"at most {limit:.3g} was expected"
                )
        return result


def _tensors(result: Any) -> list[Tensor]:
    """List the tensors that a function has returned."""
    if result is None:
        return []
    return [result] if isinstance(result, Tensor) else list(result)


def _difference(computed: Tensor, expected: Tensor) -> float:
    """Return the largest difference of two rows, relative to the row's norm; infinity for another shape or a NaN."""
    if computed.shape != expected.shape:
        return float("inf")
    if not computed.is_floating_point():
        return 0.0 if torch.equal(computed, expected) else float("inf")

    computed = computed.float().flatten(0, -2) if computed.dim() > 1 else computed.float()
    expected = expected.float().view(computed.shape)
    same_infinity = (computed == expected) & expected.isinf()
    difference = (computed - expected).masked_fill(same_infinity, 0.0).norm(dim=-1)
    length = expected.masked_fill(expected.isinf(), 0.0).norm(dim=-1)
    # a row that is almost zero is measured by a thousandth of the longest row
    shortest = 1e-3 * float(length.max()) if length.numel() else 0.0
    ratio = difference / length.clamp_min(max(shortest, 1e-30))
    return float(ratio.nan_to_num(float("inf")).max()) if ratio.numel() else 0.0
