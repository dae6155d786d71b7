"""Positions that a module of transformers counts itself: in a flat batch the count of rows is none."""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

FIRST_COUNTS = (0, 1)  # with which a count of rows begins


class _EachResult(TorchFunctionMode):
    """Passes what torch's functions make through `change(function, made)`, in this thread."""

    def __init__(self, change: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self._change = change

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._change(function, function(*args, **(kwargs or {})))


@contextmanager
def counting(modules: Collection[nn.Module], num_tokens: int, shift: int) -> Iterator[dict[nn.Module, Any]]:
    """Find which of the modules count so many rows, and by which function of torch, within the block.

    shift: added to what each counts first. Positions that the model is given shall be far from such counts.
    """
    found: dict[nn.Module, Any] = {}
    running: list[nn.Module] = []

    def note(function: Any, made: Any) -> Any:
        if not running or running[-1] in found or not isinstance(made, Tensor) or made.shape[-1:] != (num_tokens,):
            return made
        if made.numel() != num_tokens or made.dtype == torch.bool or made.is_meta:
            return made
        row = made.flatten().tolist()
        if row[0] not in FIRST_COUNTS or row != [row[0] + i for i in range(num_tokens)]:
            return made
        found[running[-1]] = function
        return made + shift

    hooks = [
        hook
        for module in modules
        for hook in (
            module.register_forward_pre_hook(lambda module, _: running.append(module)),
            module.register_forward_hook(lambda *_: running.pop() and None),
        )
    ]
    try:
        with _EachResult(note):
            yield found
    finally:
        for hook in hooks:
            hook.remove()


def tell_positions(module: nn.Module, positions: Callable[[], Tensor | None]) -> None:
    """Give the module, where it first counts rows by torch.arange, these positions, [rows]; None lets it count."""
    compute = module.forward

    def forward(*args: Any, **options: Any) -> Any:
        known = positions()
        if known is None:
            return compute(*args, **options)

        left = [known]

        def told(function: Any, made: Any) -> Any:
            counts = left and function is torch.arange and made.shape == known.shape
            return left.pop().to(made.dtype) if counts else made

        with _EachResult(told):
            return compute(*args, **options)

    module.forward = forward
