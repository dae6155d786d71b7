"""Log probabilities and ranks of given tokens: two passes over a row of logits, and one more for each given token."""

from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray, float32, int64
from torch import Tensor

from engine.cpu_kernels.cpu_sampler import INFINITY, LOWEST_KEY
from engine.cpu_kernels.kernel import ELEMENTS, Kernel, next_task
from engine.cpu_kernels.scalars import float32_of, helper, pointer_to, row_pointer, wide
from engine.cpu_kernels.softmax import exp_of_negative
from engine.cpu_kernels.token_weights import ordered_key

NOT_A_NUMBER = np.float32(np.nan)


def score_tokens(logits: Tensor, token_ids: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute as `score_tokens` of engine/sampling/token_scores.py does. logits: float32 or bfloat16."""
    firsts = torch.searchsorted(rows, torch.arange(len(logits) + 1))  # each row's first token
    logprobs = torch.empty(len(token_ids))
    ranks = torch.empty(len(token_ids), dtype=torch.int64)
    totals = torch.empty(len(logits))
    _kernel(logits.dtype)(
        len(logits),
        logits,
        logits.stride(0),
        logits.shape[1],
        firsts,
        token_ids,
        logprobs,
        ranks,
        totals,
    )
    return logprobs, ranks, totals


@helper()
def _highest(logits: Any) -> Any:
    """Return the highest logit; NaN if any logit is NaN or infinity, or if all are minus infinity."""
    key = np.int32(LOWEST_KEY)
    for i in range(len(logits)):
        key = max(key, ordered_key(wide(logits[i])))
    if -INFINITY < key < INFINITY:
        return float32_of(key) if key >= 0 else -float32_of(-key)
    return NOT_A_NUMBER


@helper(fastmath=True)
def _sum_of_weights(logits: Any, highest: Any) -> Any:
    total = np.float32(0)
    for i in range(len(logits)):
        total += exp_of_negative(wide(logits[i]) - highest)
    return total


@helper()
def _num_above(logits: Any, token_id: Any) -> Any:
    """Count the tokens that come before this one: likelier, or as likely and with a lower id."""
    own, number = wide(logits[token_id]), np.int32(0)
    for i in range(token_id):
        number += np.int32(wide(logits[i]) >= own)
    for i in range(token_id, len(logits)):
        number += np.int32(wide(logits[i]) > own)
    return number


@cache
def _kernel(dtype: torch.dtype) -> Kernel:
    element = ELEMENTS[dtype]

    def score(parameters: Any) -> None:
        firsts, token_ids = pointer_to(parameters[6], int64), pointer_to(parameters[7], int64)
        logprobs, ranks = pointer_to(parameters[8], float32), pointer_to(parameters[9], int64)
        totals = pointer_to(parameters[10], float32)
        task = next_task(parameters)
        while task >= 0:
            logits = carray(
                row_pointer(parameters[3], task, parameters[4], element), (parameters[5],)
            )
            highest = _highest(logits)
            totals[task] = highest + np.log(_sum_of_weights(logits, highest))
            for i in range(firsts[task], firsts[task + 1]):
                logprobs[i] = wide(logits[token_ids[i]]) - totals[task]
                ranks[i] = 1 + _num_above(logits, token_ids[i])
            task = next_task(parameters)

    return Kernel(score)
