"""Chooses each token's experts, and sorts the rows of all tokens by expert: one launch each."""

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 1024  # choices that a program looks at together
LARGEST = tl.constexpr(3e38)  # of float32's numbers, nearly


@triton.jit
def choose_kernel(
    weights_ptr, chosen_ptr, scores_ptr,
    EXPERTS: tl.constexpr, EXPERTS_PAD: tl.constexpr, CHOSEN: tl.constexpr, CHOSEN_PAD: tl.constexpr,
    NORMALISED: tl.constexpr,
):  # fmt: skip
    """Program (token): choose the token's experts, and weigh them."""
    token = tl.program_id(0).to(tl.int64)
    experts, places = tl.arange(0, EXPERTS_PAD), tl.arange(0, CHOSEN_PAD)
    inside = experts < EXPERTS
    scores = tl.load(scores_ptr + token * EXPERTS + experts, mask=inside, other=0.0).to(tl.float32)
    # a row of padding may hold any scores, and still must get experts that exist
    scores = tl.minimum(tl.maximum(tl.where(scores == scores, scores, -LARGEST), -LARGEST), LARGEST)
    rest = tl.where(inside, scores, float("-inf"))
    highest = tl.max(rest, 0)
    total = 0.0 if NORMALISED else tl.sum(tl.exp(rest - highest), 0)
    weights = tl.zeros([CHOSEN_PAD], tl.float32)
    chosen = tl.zeros([CHOSEN_PAD], tl.int64)
    for i in tl.static_range(CHOSEN):
        expert = tl.argmax(rest, 0)
        weight = tl.exp(tl.max(rest, 0) - highest)
        if NORMALISED:
            total += weight
        weights = tl.where(places == i, weight, weights)
        chosen = tl.where(places == i, expert.to(tl.int64), chosen)
        rest = tl.where(experts == expert, float("-inf"), rest)
    tl.store(weights_ptr + token * CHOSEN + places, weights / total, mask=places < CHOSEN)
    tl.store(chosen_ptr + token * CHOSEN + places, chosen, mask=places < CHOSEN)


@triton.jit(do_not_specialize=["num_choices"])
def group_kernel(
    tokens_ptr, places_ptr, ends_ptr, chosen_ptr, num_choices,
    CHOSEN: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Program (expert): count the rows of the experts before, then number its own."""
    expert = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, TILE)
    row = tl.zeros([], tl.int32)
    end = tl.zeros([], tl.int32)
    for start in tl.range(0, num_choices, TILE):
        inside = start + offsets < num_choices
        chosen = tl.load(chosen_ptr + start + offsets, mask=inside, other=0)
        row += tl.sum((inside & (chosen < expert)).to(tl.int32), 0)
        end += tl.sum((inside & (chosen <= expert)).to(tl.int32), 0)
    tl.store(ends_ptr + expert, end)
    for start in tl.range(0, num_choices, TILE):
        inside = start + offsets < num_choices
        chosen = tl.load(chosen_ptr + start + offsets, mask=inside, other=0)
        own = inside & (chosen == expert)
        rows = row + tl.cumsum(own.to(tl.int32), 0) - 1
        row += tl.sum(own.to(tl.int32), 0)
        tl.store(places_ptr + start + offsets, rows.to(tl.int64), mask=own)
        tl.store(tokens_ptr + rows, ((start + offsets) // CHOSEN).to(tl.int64), mask=own)


def choose_experts(scores: Tensor, num_chosen: int, *, normalised: bool) -> tuple[Tensor, Tensor]:
    """Return the weights, float32, and ids, int64, of each token's highest scores: [tokens, chosen].

    scores: [tokens, experts], contiguous. The weights are the scores' softmax; if `normalised`, that of the chosen
    scores alone.
    """
    assert scores.is_contiguous()
    num_tokens, num_experts = scores.shape
    weights = torch.empty((num_tokens, num_chosen), dtype=torch.float32, device=scores.device)
    chosen = torch.empty((num_tokens, num_chosen), dtype=torch.int64, device=scores.device)
    choose_kernel[(num_tokens,)](
        weights, chosen, scores,
        EXPERTS=num_experts, EXPERTS_PAD=triton.next_power_of_2(num_experts),
        CHOSEN=num_chosen, CHOSEN_PAD=triton.next_power_of_2(num_chosen), NORMALISED=normalised, num_warps=1,
    )  # fmt: skip
    return weights, chosen


def group_by_expert(chosen: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the fields of ExpertGroups of engine/layers/moe.py. chosen: [tokens, experts of a token] int64."""
    tokens, places = torch.empty_like(chosen), torch.empty_like(chosen)
    ends = torch.empty(num_experts, dtype=torch.int32, device=chosen.device)
    group_kernel[(num_experts,)](
        tokens, places, ends, chosen, chosen.numel(),
        CHOSEN=chosen.shape[1], TILE=TILE, num_warps=4,
    )  # fmt: skip
    return tokens.view(-1), places, ends
