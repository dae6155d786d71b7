"""Positions that a module of transformers counts itself: in a flat batch the count of rows is none."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class _EachRange(TorchFunctionMode):
    """Passes what torch.arange makes through a function, in this thread."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._change = change

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        return self._change(made) if function is torch.arange else made


@contextmanager
def counting_modules(model: nn.Module, num_tokens: int) -> Iterator[set[nn.Module]]:
    """Find the modules that count so many rows, themselves and not by a part of them, within the block."""
    found: set[nn.Module] = set()
    running: list[nn.Module] = []

    def note(made: Tensor) -> Tensor:
        if made.shape == (num_tokens,) and running:
            found.add(running[-1])
        return made

    hooks = [
        hook
        for module in model.modules()
        for hook in (
            module.register_forward_pre_hook(lambda module, _: running.append(module)),
            module.register_forward_hook(lambda *_: running.pop() and None),
        )
    ]
    try:
        with _EachRange(note):
            yield found
    finally:
        for hook in hooks:
            hook.remove()


def tell_positions(module: nn.Module, positions: Callable[[], Tensor | None]) -> None:
    """Give the module, where it counts rows, these positions, [rows]; None lets it count."""
    compute = module.forward

    def forward(*args: Any, **options: Any) -> Any:
        known = positions()
        if known is None:
            return compute(*args, **options)
        with _EachRange(lambda made: known.to(made.dtype) if made.shape == known.shape else made):
            return compute(*args, **options)

    module.forward = forward
