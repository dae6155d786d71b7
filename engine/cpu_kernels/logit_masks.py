"""Masks logits on a CPU in one pass: minus infinity for each token that a row's mask leaves out."""

from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray, int32, int64
from torch import Tensor

from engine.cpu_kernels.kernel import ELEMENTS, Kernel, next_task
from engine.cpu_kernels.scalars import narrow, pointer_to, row_pointer

WORD = 32  # tokens of a mask in one number
NEVER = np.float32(-np.inf)


def mask_rows(logits: Tensor, rows: Tensor, masked: Tensor, token_masks: Tensor) -> None:
    """Put minus infinity where a row's mask has no 1, and for the tokens after the mask's last word.

    logits: [rows, vocabulary] float32 or bfloat16; rows may lie apart, the numbers of a row are adjacent.
    masked: [masked rows, 2] int64, a place in `rows` and the number of its mask in token_masks.
    """
    assert logits.stride(1) == 1
    _kernel(logits.dtype)(
        len(masked), logits, logits.stride(0), logits.shape[1], rows, masked, token_masks,
        token_masks.shape[1],
    )  # fmt: skip


@cache
def _kernel(dtype: torch.dtype) -> Kernel:
    element = ELEMENTS[dtype]

    def mask(parameters: Any) -> None:
        vocab, num_words = parameters[5], parameters[9]
        rows, masked = pointer_to(parameters[6], int64), pointer_to(parameters[7], int64)
        never = narrow(NEVER, element)
        task = next_task(parameters)
        while task >= 0:
            row = rows[masked[2 * task]]
            logits = carray(row_pointer(parameters[3], row, parameters[4], element), (vocab,))
            words = carray(
                row_pointer(parameters[8], masked[2 * task + 1], num_words, int32), (num_words,)
            )
            for place in range(-(-vocab // WORD)):
                word = words[place] if place < num_words else np.int32(0)
                if word != -1:  # otherwise all its tokens stay
                    first = place * WORD
                    own = logits[first : first + WORD]  # fewer at the end
                    for i in range(len(own)):
                        own[i] = own[i] if (word >> i) & 1 else never
            task = next_task(parameters)

    return Kernel(mask)
