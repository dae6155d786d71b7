"""Launches recorded instead of run: which variants of which kernels a step would have compiled, and how many
kernels of Triton's and of torch's it starts."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

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
