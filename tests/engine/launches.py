"""Launches recorded instead of run: which variants of which kernels a step would have compiled, and how many
kernels of Triton's and of torch's it starts."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpretedFunction

import engine.kernels.upload

Variant = tuple[str, tuple[Any, ...]]
INDICES = {
    "choose_kernel": ("chosen_ptr",), "group_kernel": ("tokens_ptr", "places_ptr", "experts_ptr"),
    "choose_token_kernel": ("chosen_ptr",),
}  # fmt: skip


def record_launches(monkeypatch: pytest.MonkeyPatch) -> set[Variant]:
    """From now on kernels do nothing but leave their variant in this set, and zeros where indices belong."""
    seen: set[Variant] = set()

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        given = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
        kept = set(kernel.kwargs.get("do_not_specialize") or ())
        seen.add((kernel.fn.__name__, tuple((name, _kind(v, name in kept)) for name, v in given.items())))
        for name in INDICES.get(kernel.fn.__name__, ()):
            given[name].zero_()

    monkeypatch.setattr(InterpretedFunction, "run", run)
    return seen


def _kind(value: Any, kept: bool) -> Any:
    """What the compiled kernel depends on: dtypes, pointers' alignment, constants, divisibility of integers.

    A constexpr is an integer here like any other; taking its value is right for it and too strict, so safe,
    for the rest. Source: triton.runtime.jit, specialize_impl.
    """
    if isinstance(value, Tensor):
        return str(value.dtype), value.data_ptr() % 16 == 0
    return type(value) if kept or isinstance(value, float) else value


class LaunchCount(TorchDispatchMode):
    """Within it, the names of all that a GPU would be told to start, in order: kernels and "transfer".

    Nothing of Triton's is run. An operation of torch's counts as one kernel, unless it only makes a view or
    room for a result.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.names: list[str] = []

        def run(kernel: Any, *args: Any, **kwargs: Any) -> None:
            self.names.append(kernel.fn.__name__)

        monkeypatch.setattr(InterpretedFunction, "run", run)
        pack = engine.kernels.upload.pack

        def pack_for_transfer(*args: Any, **options: Any) -> Tensor:
            self.names.append("transfer")
            return pack(*args, **options)

        monkeypatch.setattr(engine.kernels.upload, "pack", pack_for_transfer)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        is_view = any(
            each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns
        )
        if not is_view and "empty" not in name and name != "_unsafe_view":
            self.names.append(name)
        return func(*args, **(kwargs or {}))
