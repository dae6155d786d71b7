"""The gated delta net between its products: a convolution, then each head's state held in registers, token by token."""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

NORM_EPS = tl.constexpr(1e-6)  # as in engine.layers.gated_delta_net
FIELDS = tl.constexpr(5)  # of a part


@triton.jit
def load_token(
    new,
    kept,
    at,
    start,
    end,
    source,
    inside,
    ROW: tl.constexpr,
    KEPT: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Load channels of the batch's token `at`, or, before the part, of one that was kept."""
    found = tl.load(new + at * ROW, mask=inside & (at >= start) & (at < end), other=0.0)
    is_kept = inside & (at < start) & (source >= 0)
    return tl.where(
        at >= start, found, tl.load(kept + (at - start + STEPS) * KEPT, mask=is_kept, other=0.0)
    )


@triton.jit(do_not_specialize=["num_decodes", "num_parts"])
def convolve_kernel(
    x_ptr, seen_ptr, parts_ptr, weights_ptr, out_ptr, num_decodes, num_parts,
    NUM_HEADS: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr, STEPS: tl.constexpr, TILE: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """One program convolves TILE channels of a head, of a decode or of all other parts; they are seen then."""
    chain, head = tl.program_id(0), tl.program_id(1)
    channel = tl.program_id(2) * TILE + tl.arange(0, TILE)
    inside, ahead = channel < CHANNELS, tl.arange(0, TOKENS)[:, None]
    ROW: tl.constexpr = NUM_HEADS * ROWS
    new = x_ptr + head * ROWS + channel
    weights = weights_ptr + head * (STEPS + 1) * CHANNELS + channel
    for part in range(chain, tl.where(chain < num_decodes, chain + 1, num_parts)):
        first = parts_ptr + part * FIELDS
        start, end, source = tl.load(first), tl.load(first + 1), tl.load(first + 2)
        before = seen_ptr + (source * NUM_HEADS + head) * STEPS * CHANNELS + channel
        for tokens in range(start, end, TOKENS):
            token = tokens + ahead
            total = tl.zeros([TOKENS, TILE], tl.float32)
            for step in tl.static_range(STEPS + 1):
                x = load_token(
                    new,
                    before,
                    token - STEPS + step,
                    start,
                    end,
                    source,
                    inside,
                    ROW,
                    CHANNELS,
                    STEPS,
                )
                weight = tl.load(weights + step * CHANNELS, mask=inside, other=0.0)
                total += weight * x.to(tl.float32)
            total = total / (1 + tl.exp(-total))
            tl.store(
                out_ptr + (token * NUM_HEADS + head) * CHANNELS + channel,
                total,
                mask=inside & (token < end),
            )
        for step in tl.static_range(STEPS):
            x = load_token(
                new, before, end - STEPS + step, start, end, source, inside, ROW, CHANNELS, STEPS
            )
            for field in tl.static_range(3, 5):  # the row behind the part, and a snapshot's
                row = tl.load(first + field)
                after = seen_ptr + ((row * NUM_HEADS + head) * STEPS + step) * CHANNELS + channel
                tl.store(after, x, mask=inside & (row >= 0))
        tl.debug_barrier()  # the next part may begin at what this one has stored


@triton.jit(do_not_specialize=["num_decodes", "num_parts"])
def correct_kernel(
    x_ptr, convolved_ptr, states_ptr, parts_ptr, decay_ptr, bias_ptr, norm_ptr, out_ptr, num_decodes, num_parts, eps,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, KEY_PAD: tl.constexpr,
    VALUE_PAD: tl.constexpr,
):  # fmt: skip
    """One program has a head of values, of a decode or of all other parts."""
    chain, value_head = tl.program_id(0), tl.program_id(1)
    head, own = value_head // GROUP, value_head % GROUP
    CHANNELS: tl.constexpr = 2 * KEY + GROUP * VALUE
    ROWS: tl.constexpr = CHANNELS + GROUP * VALUE + 2 * GROUP
    i, d = tl.arange(0, KEY_PAD), tl.arange(0, VALUE_PAD)
    inside = (d < VALUE)[:, None] & (i < KEY)[None, :]
    places = d[:, None] * KEY + i[None, :]
    decay_rate, bias = tl.load(decay_ptr + value_head), tl.load(bias_ptr + value_head)
    norm = tl.load(norm_ptr + d, mask=d < VALUE, other=0.0)
    for part in range(chain, tl.where(chain < num_decodes, chain + 1, num_parts)):
        first = parts_ptr + part * FIELDS
        start, end, source = tl.load(first), tl.load(first + 1), tl.load(first + 2)
        before = states_ptr + (source * NUM_HEADS * GROUP + value_head) * VALUE * KEY
        state = tl.load(before + places, mask=inside & (source >= 0), other=0.0)
        for token in range(start, end):
            x = x_ptr + (token * NUM_HEADS + head) * ROWS + CHANNELS
            convolved = convolved_ptr + (token * NUM_HEADS + head) * CHANNELS
            query = tl.load(convolved + i, mask=i < KEY, other=0.0)
            key = tl.load(convolved + KEY + i, mask=i < KEY, other=0.0)
            value = tl.load(convolved + 2 * KEY + own * VALUE + d, mask=d < VALUE, other=0.0)
            query *= tl.rsqrt(tl.sum(query * query, 0) + NORM_EPS) / tl.sqrt(KEY * 1.0)
            key *= tl.rsqrt(tl.sum(key * key, 0) + NORM_EPS)
            rate = tl.load(x + GROUP * VALUE + own).to(tl.float32)
            step = tl.load(x + GROUP * VALUE + GROUP + own).to(tl.float32) + bias
            state *= tl.exp(
                decay_rate * (tl.maximum(step, 0.0) + tl.log(1 + tl.exp(-tl.abs(step))))
            )
            added = (value - tl.sum(state * key[None, :], 1)) / (1 + tl.exp(-rate))
            state += added[:, None] * key[None, :]
            found = tl.sum(state * query[None, :], 1)
            found *= tl.rsqrt(tl.sum(found * found, 0) / VALUE + eps) * norm
            gate = tl.load(x + own * VALUE + d, mask=d < VALUE, other=0.0).to(tl.float32)
            out = out_ptr + (token * NUM_HEADS * GROUP + value_head) * VALUE + d
            tl.store(
                out,
                (found * gate / (1 + tl.exp(-gate))).to(out_ptr.dtype.element_ty),
                mask=d < VALUE,
            )
        for field in tl.static_range(3, 5):
            row = tl.load(first + field)
            after = states_ptr + (row * NUM_HEADS * GROUP + value_head) * VALUE * KEY
            tl.store(after + places, state, mask=inside & (row >= 0))
        tl.debug_barrier()


def delta_net(
    x: Tensor, memory: Sequence[Tensor], parts: Any, weights: Sequence[Tensor], heads: Any
) -> Tensor:
    """Compute as `mix` of engine.layers.gated_delta_net; decodes by themselves, other parts one after the other."""
    num_heads, channels = heads.num_heads, heads.num_channels
    seen, states = memory
    conv, decay, bias, norm = weights
    convolved = torch.empty((len(x), num_heads * channels), dtype=torch.float32, device=x.device)
    out = x.new_empty(len(x), num_heads * heads.group * heads.value_dim)
    counts = num_decodes, num_parts = len(parts.decodes), len(parts.table)
    num_chains = num_decodes + (num_parts > num_decodes)
    tile = min(128, triton.next_power_of_2(channels))
    convolve_kernel[(num_chains, num_heads, triton.cdiv(channels, tile))](
        x, seen, parts.table, conv, convolved, *counts,
        NUM_HEADS=num_heads, ROWS=sum(heads.rows.values()), CHANNELS=channels, STEPS=heads.kernel_size - 1, TILE=tile,
        TOKENS=8, num_warps=max(1, tile // 32),
    )  # fmt: skip
    key_pad, value_pad = (
        triton.next_power_of_2(heads.key_dim),
        triton.next_power_of_2(heads.value_dim),
    )
    correct_kernel[(num_chains, num_heads * heads.group)](
        x, convolved, states, parts.table, decay, bias, norm, out, *counts, heads.eps,
        NUM_HEADS=num_heads, GROUP=heads.group, KEY=heads.key_dim, VALUE=heads.value_dim, KEY_PAD=key_pad,
        VALUE_PAD=value_pad, num_warps=min(16, max(1, key_pad * value_pad // 1024)),
    )  # fmt: skip
    return out
