"""Finds modules of transformers that count positions themselves, and gives them the right positions.

Such a module counts rows from zero. In a flat batch of several sequences that count is wrong.
"""

import inspect
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from engine.errors import UnsupportedModel
from engine.models.attention_calls import NUM_RECORDED_TOKENS, AttentionCall

# The results of two equal passes may differ by this: GPUs may add in another order.
ROUNDING = 0.01
FIRST_COUNTS = (0, 1)  # with which a count of rows begins


class _EachResult(TorchFunctionMode):
    """Replaces what each torch function returns by `change(function, returned)`, in this thread."""

    def __init__(self, change: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self._change = change

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return self._change(function, function(*args, **(kwargs or {})))


@contextmanager
def counting(
    modules: Collection[nn.Module], num_tokens: int, shift: int
) -> Iterator[dict[nn.Module, Any]]:
    """Find which modules count all tokens within the block, from 0 or 1, and by which function of torch.

    Yields a mapping from module to function, filled in the block. num_tokens: the tokens of the pass.
    shift: is added to each module's first count. Positions that the model is given must not look like such a count.
    """
    functions: dict[nn.Module, Any] = {}
    running: list[nn.Module] = []

    def note(function: Any, made: Any) -> Any:
        """Note the function if it made the running module's first count, and return that count shifted."""
        if (
            not running
            or running[-1] in functions
            or not isinstance(made, Tensor)
            or made.shape[-1:] != (num_tokens,)
        ):
            return made
        if made.numel() != num_tokens or made.dtype == torch.bool or made.is_meta:
            return made
        row = made.flatten().tolist()
        if row[0] not in FIRST_COUNTS or row != [row[0] + i for i in range(num_tokens)]:
            return made
        functions[running[-1]] = function
        return made + shift

    def leave(*_: Any) -> None:
        running.pop()  # returns nothing: a value would replace the module's output

    hooks = [
        hook
        for module in modules
        for hook in (
            module.register_forward_pre_hook(lambda module, _: running.append(module)),
            module.register_forward_hook(leave),
        )
    ]
    try:
        with _EachResult(note):
            yield functions
    finally:
        for hook in hooks:
            hook.remove()


def tell_positions(module: nn.Module, positions: Callable[[], Tensor | None]) -> None:
    """Replace the module's first count of rows by torch.arange, in each forward pass, with given positions, [rows].

    positions: returns them, or None to let the module count.
    """
    compute = module.forward

    def forward(*args: Any, **options: Any) -> Any:
        known = positions()
        if known is None:
            return compute(*args, **options)

        unused = [known]  # empty once the positions have replaced a count

        def replace_count(function: Any, made: Any) -> Any:
            is_count = function is torch.arange and made.shape == known.shape
            return unused.pop().to(made.dtype) if unused and is_count else made

        with _EachResult(replace_count):
            return compute(*args, **options)

    module.forward = forward


@dataclass
class Recorded:
    """What a pass without attention did.

    calls: its attention calls. called: all modules that ran. bodies: modules that returned hidden states and what each
    returned, in the order in which they ended.
    """

    calls: list[AttentionCall] = field(default_factory=list)
    called: set[nn.Module] = field(default_factory=set)
    bodies: list[tuple[nn.Module, Any]] = field(default_factory=list)

    def equals(self, other: "Recorded") -> bool:
        """Whether both passes have equal queries, keys, values and last hidden states, apart from rounding."""
        return len(self.calls) == len(other.calls) and all(
            mine.shape == its.shape and (mine - its).norm() <= ROUNDING * its.norm()
            for mine, its in zip(self._values(), other._values(), strict=True)
        )

    def _values(self) -> list[Tensor]:
        attended = [tensor for call in self.calls for tensor in (call.query, call.key, call.value)]
        return [*attended, self.bodies[-1][1].last_hidden_state]


def takes_positions(body: nn.Module) -> bool:
    """Whether the body takes positions as an argument."""
    return "position_ids" in inspect.signature(body.forward).parameters


def find_positions(
    body: nn.Module, near: Recorded, max_positions: int, record: Callable[[int | None], Recorded]
) -> tuple[int, Collection[nn.Module]]:
    """Return the position of a sequence's first token, and the attending modules that count positions themselves.

    near: the record of a pass that was given no positions. record: runs the body again with its first token at the
    given position; None gives the body no positions. The body is run at its first and at its last positions, as a
    module's own count may change the result only at one of them. Raises UnsupportedModel if the body or a module
    counts in a way that cannot be replaced.
    """
    if not takes_positions(body):
        return 0, _counting_parts(body, near, max_positions, record)
    begin = next((n for n in FIRST_COUNTS if near.equals(record(n))), None)
    if begin is None:
        raise UnsupportedModel(
            "its positions are no count of all tokens (RoBERTa and its kin leave out padding)"
        )
    first = max_positions - NUM_RECORDED_TOKENS
    if first <= max(FIRST_COUNTS):
        return begin, ()
    attending = {call.module for call in near.calls}
    with counting(attending, NUM_RECORDED_TOKENS, shift=first) as functions:
        shifted = record(first)
    if not functions or shifted.equals(record(first)):
        return begin, ()
    for module, function in functions.items():
        if function is not torch.arange:
            raise UnsupportedModel(f"{type(module).__name__} counts tokens by itself")
    return begin, functions


def _counting_parts(
    body: nn.Module, near: Recorded, max_positions: int, record: Callable[[int | None], Recorded]
) -> Collection[nn.Module]:
    """Return the modules that count positions, in a body that takes no positions.

    Raises UnsupportedModel if no module counts, or one counts by another function than torch.arange.
    """
    if all("alibi" in call.options for call in near.calls):
        return ()  # ALiBi biases take the place of positions
    shift = max_positions - NUM_RECORDED_TOKENS
    with counting(near.called, NUM_RECORDED_TOKENS, shift=shift) as functions:
        shifted = record(None)
    if near.equals(shifted) or set(functions.values()) != {torch.arange}:
        raise UnsupportedModel(
            f"{type(body).__name__} takes no position_ids: it counts tokens by itself"
        )
    return functions
