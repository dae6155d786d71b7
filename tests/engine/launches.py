"""Launches in Triton's interpreter: which kernels they are of, and which variants would be compiled for them."""

from typing import Any

import pytest
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

Variant = tuple[str, tuple[Any, ...]]
INDICES = {
    "choose_kernel": ("chosen_ptr",), "group_kernel": ("tokens_ptr", "places_ptr"),
    "choose_token_kernel": ("chosen_ptr",),
}  # fmt: skip


def record_launches(
    monkeypatch: pytest.MonkeyPatch, launches: list[str] | None = None
) -> set[Variant]:
    """From now on kernels do nothing but leave their variant in this set, and zeros where indices belong.

    launches: gets each launch's kernel.
    """
    seen: set[Variant] = set()

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        if launches is not None:
            launches.append(kernel.fn.__name__)
        given = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
        kept = set(kernel.kwargs.get("do_not_specialize") or ())
        seen.add(
            (kernel.fn.__name__, tuple((name, _kind(v, name in kept)) for name, v in given.items()))
        )
        for name in INDICES.get(kernel.fn.__name__, ()):
            given[name].zero_()

    monkeypatch.setattr(InterpretedFunction, "run", run)
    return seen


def _kind(value: Any, kept: bool) -> Any:
    """What the compiled kernel depends on, and each constant's value. Source: triton.runtime.jit, specialize_impl."""
    if isinstance(value, Tensor):
        return str(value.dtype), value.data_ptr() % 16 == 0
    return type(value) if kept or isinstance(value, float) else value
