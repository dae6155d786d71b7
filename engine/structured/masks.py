"""The masks of a step's rows, each by its grammar, computed while the step runs on its device.

In the thread that takes the steps. What another one of Python's did beside a step would wait for this one
again and again, and this one for it, which costs more than masks do. On a GPU the host is free while the step
runs; on a CPU its cores are busy with the step. Masks of large vocabularies are one call of llguidance, which
has threads.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.structured.matcher import Matcher

MAX_MASK_S = 2.0  # for one token: a grammar that takes longer would hold up all other rows


def fill_masks(matchers: Sequence[Matcher], masks: NDArray[np.int32], *, one_by_one: bool = False) -> None:
    """Write for each matcher the mask of the tokens that may come next: [matchers, num_words] int32.

    Tokens that end the completion are in it where the text may end. Where it leaves none, the matcher's
    `error` may say why; `accept` of the token that is then missing raises.
    matchers: of one vocabulary.  masks: contiguous; what is in them before does not matter.
    one_by_one: those of a large vocabulary too. Then a matcher whose mask takes longer than MAX_MASK_S comes
    to an error.
    """
    vocabulary, address, num_bytes = matchers[0].vocabulary, masks.ctypes.data, masks.strides[0]
    if vocabulary.executor is not None and not one_by_one:
        machines = [(each.machine, row) for row, each in enumerate(matchers)]
        vocabulary.executor.unsafe_compute_mask_ptr(machines, address, num_bytes, len(masks))
    else:
        start = time.monotonic()
        for row, matcher in enumerate(matchers):
            matcher.machine.unsafe_compute_mask_ptr(address + row * num_bytes, num_bytes)
            end = time.monotonic()
            if end - start > MAX_MASK_S:
                matcher.error = f"its next token takes too long to find ({end - start:.1f} s)"
            start = end
    words, bits = vocabulary.eos_words, vocabulary.eos_bits
    has_eos = (masks[:, words] & bits).any(axis=1)
    masks[:, words] &= ~bits
    for row in np.flatnonzero(has_eos).tolist():
        if matchers[row].may_end:
            masks[row] |= matchers[row].end_mask
        elif error := matchers[row].machine_error():  # then llguidance allows an end alone
            matchers[row].error = error
    for row, matcher in enumerate(matchers):
        if matcher.error is not None:
            masks[row] = 0
        elif matcher.allowed is not None:
            masks[row, : len(matcher.allowed)] &= matcher.allowed


@dataclass(frozen=True)
class StepMasks:
    """Masks of a step that are still to be computed. masks: [matchers, num_words] int32, contiguous."""

    matchers: list[Matcher]
    masks: NDArray[np.int32]

    def fill(self) -> None:
        """Compute them.

        Where they take too long all together, those of their rows that go on are computed one by one from
        then on, to see whose does.
        """
        one_by_one = any(each.is_suspect for each in self.matchers)
        start = time.monotonic()
        fill_masks(self.matchers, self.masks, one_by_one=one_by_one)
        if time.monotonic() - start > MAX_MASK_S:
            for matcher in self.matchers:
                matcher.is_suspect = True
