"""The gated delta net between its products: a convolution, then each head's state, which a program holds in registers.

In a decode, the one new token corrects the state. Other parts are computed in chunks of tokens, by matrix products.
How the tokens of a chunk affect each other is computed first, for all chunks side by side. Then a program goes through
the chunks of a part, for a tile of a head's values. Sources: arXiv:2406.06484, arXiv:2412.06464.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

NORM_EPS = tl.constexpr(1e-6)  # as in engine.layers.gated_delta_net
FIELDS = tl.constexpr(5)  # of a part
CHUNK = 32
"""Tokens. The inverse of a chunk of 64 takes eight times the products, for half the chunks."""

KEY_TILE = 16  # numbers of a key in one product: more take more registers
VALUE_TILE = 32
GATE_TOKENS = 8
LEAST_DECAY = tl.constexpr(-30.0)
"""Logarithm that stands for stronger decays. It is nothing beside 1, and sums over a chunk stay exact to 1e-4."""
PRECISION = tl.constexpr("tf32x3")  # three products in tf32, nearly as exact as one in float32


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
    """Load channels of the batch's token `at`; before the part's start, of a token kept from earlier steps."""
    found = tl.load(new + at * ROW, mask=inside & (at >= start) & (at < end), other=0.0)
    is_kept = inside & (at < start) & (source >= 0)
    return tl.where(
        at >= start, found, tl.load(kept + (at - start + STEPS) * KEPT, mask=is_kept, other=0.0)
    )


@triton.jit
def decay_of(x, bias, rate):
    """Return the logarithm of a token's decay."""
    step = x.to(tl.float32) + bias
    return rate * (tl.maximum(step, 0.0) + tl.log(1 + tl.exp(-tl.abs(step))))


@triton.jit(do_not_specialize=["first_part"])
def convolve_kernel(
    x_ptr, seen_ptr, parts_ptr, weights_ptr, out_ptr, first_part,
    NUM_HEADS: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr, STEPS: tl.constexpr, TILE: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """One program convolves TILE channels of a head for a part, and keeps the last tokens for the next step."""
    head = tl.program_id(1)
    channel = tl.program_id(2) * TILE + tl.arange(0, TILE)
    inside, ahead = channel < CHANNELS, tl.arange(0, TOKENS)[:, None]
    ROW: tl.constexpr = NUM_HEADS * ROWS
    new = x_ptr + head * ROWS + channel
    weights = weights_ptr + head * (STEPS + 1) * CHANNELS + channel
    first = parts_ptr + (first_part + tl.program_id(0)) * FIELDS
    start, end, source = tl.load(first), tl.load(first + 1), tl.load(first + 2)
    before = seen_ptr + (source * NUM_HEADS + head) * STEPS * CHANNELS + channel
    for tokens in range(start, end, TOKENS):
        token = tokens + ahead
        total = tl.zeros([TOKENS, TILE], tl.float32)
        for step in tl.static_range(STEPS + 1):
            at = token - STEPS + step
            x = load_token(new, before, at, start, end, source, inside, ROW, CHANNELS, STEPS)
            weight = tl.load(weights + step * CHANNELS, mask=inside, other=0.0)
            total += weight * x.to(tl.float32)
        total = total / (1 + tl.exp(-total))
        out = out_ptr + (token * NUM_HEADS + head) * CHANNELS + channel
        tl.store(out, total, mask=inside & (token < end))
    tl.debug_barrier()  # what was kept is read by all before it is replaced
    for step in tl.static_range(STEPS):
        at = end - STEPS + step
        x = load_token(new, before, at, start, end, source, inside, ROW, CHANNELS, STEPS)
        for field in tl.static_range(3, 5):  # the row behind the part, and a snapshot's
            row = tl.load(first + field)
            after = seen_ptr + ((row * NUM_HEADS + head) * STEPS + step) * CHANNELS + channel
            tl.store(after, x, mask=inside & (row >= 0))


@triton.jit
def correct_kernel(
    x_ptr, convolved_ptr, states_ptr, parts_ptr, decay_ptr, bias_ptr, norm_ptr, out_ptr, eps,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, KEY_PAD: tl.constexpr,
    VALUE_PAD: tl.constexpr,
):  # fmt: skip
    """One program computes a head of values for a decode."""
    value_head = tl.program_id(1)
    head, own = value_head // GROUP, value_head % GROUP
    CHANNELS: tl.constexpr = 2 * KEY + GROUP * VALUE
    ROWS: tl.constexpr = CHANNELS + GROUP * VALUE + 2 * GROUP
    i, d = tl.arange(0, KEY_PAD), tl.arange(0, VALUE_PAD)
    inside = (d < VALUE)[:, None] & (i < KEY)[None, :]
    places = d[:, None] * KEY + i[None, :]
    first = parts_ptr + tl.program_id(0) * FIELDS
    token, source = tl.load(first), tl.load(first + 2)
    before = states_ptr + (source * NUM_HEADS * GROUP + value_head) * VALUE * KEY
    state = tl.load(before + places, mask=inside & (source >= 0), other=0.0)
    x = x_ptr + (token * NUM_HEADS + head) * ROWS + CHANNELS
    convolved = convolved_ptr + (token * NUM_HEADS + head) * CHANNELS
    query = tl.load(convolved + i, mask=i < KEY, other=0.0)
    key = tl.load(convolved + KEY + i, mask=i < KEY, other=0.0)
    value = tl.load(convolved + 2 * KEY + own * VALUE + d, mask=d < VALUE, other=0.0)
    query *= tl.rsqrt(tl.sum(query * query, 0) + NORM_EPS) / tl.sqrt(KEY * 1.0)
    key *= tl.rsqrt(tl.sum(key * key, 0) + NORM_EPS)
    rate = tl.load(x + GROUP * VALUE + own).to(tl.float32)
    decay_rate, bias = tl.load(decay_ptr + value_head), tl.load(bias_ptr + value_head)
    state *= tl.exp(decay_of(tl.load(x + GROUP * VALUE + GROUP + own), bias, decay_rate))
    added = (value - tl.sum(state * key[None, :], 1)) / (1 + tl.exp(-rate))
    state += added[:, None] * key[None, :]
    found = tl.sum(state * query[None, :], 1)
    norm = tl.load(norm_ptr + d, mask=d < VALUE, other=0.0)
    found *= tl.rsqrt(tl.sum(found * found, 0) / VALUE + eps) * norm
    gate = tl.load(x + own * VALUE + d, mask=d < VALUE, other=0.0).to(tl.float32)
    out = out_ptr + (token * NUM_HEADS * GROUP + value_head) * VALUE + d
    gated = found * gate / (1 + tl.exp(-gate))
    tl.store(out, gated.to(out_ptr.dtype.element_ty), mask=d < VALUE)
    for field in tl.static_range(3, 5):
        row = tl.load(first + field)
        after = states_ptr + (row * NUM_HEADS * GROUP + value_head) * VALUE * KEY
        tl.store(after + places, state, mask=inside & (row >= 0))


@triton.jit(do_not_specialize=["first_part"])
def solve_kernel(
    x_ptr, convolved_ptr, chunks_ptr, totals_ptr, scales_ptr, parts_ptr, decay_ptr, bias_ptr, first_part,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, KEY_TILE: tl.constexpr,
    CHUNK: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """One program computes how a chunk's tokens affect each other in a head of values, and scales of queries and keys.

    Let A[i, j] be what token i finds of what an earlier token j has added. Then (I + A)^-1 turns what the tokens would
    add alone into what they add together. The inverse of [[P, 0], [L, Q]] is [[P^-1, 0], [-Q^-1 L P^-1, Q^-1]], so
    each level inverts blocks of twice the size. No power of A is computed: it might be large.
    """
    value_head = tl.program_id(2)
    head, own = value_head // GROUP, value_head % GROUP
    CHANNELS: tl.constexpr = 2 * KEY + GROUP * VALUE
    ROWS: tl.constexpr = CHANNELS + GROUP * VALUE + 2 * GROUP
    first = parts_ptr + (first_part + tl.program_id(0)) * FIELDS
    start, end = tl.load(first) + tl.program_id(1) * CHUNK, tl.load(first + 1)
    if start >= end:
        return
    number, i = tl.arange(0, CHUNK), tl.arange(0, KEY_TILE)
    there = start + number < end
    later, earlier = number[:, None], number[None, :]
    rows = convolved_ptr + (start * NUM_HEADS + head) * CHANNELS
    rows += later * (NUM_HEADS * CHANNELS) + i[None, :]
    keys, scores = tl.zeros([CHUNK, CHUNK], tl.float32), tl.zeros([CHUNK, CHUNK], tl.float32)
    query_sum, key_sum = tl.zeros([CHUNK], tl.float32), tl.zeros([CHUNK], tl.float32)
    for begin in range(0, KEY, KEY_TILE):
        inside = there[:, None] & (begin + i < KEY)[None, :]
        query = tl.load(rows + begin, mask=inside, other=0.0)
        key = tl.load(rows + KEY + begin, mask=inside, other=0.0)
        query_sum += tl.sum(query * query, 1)
        key_sum += tl.sum(key * key, 1)
        keys += tl.dot(key, tl.trans(key), input_precision=PRECISION)
        scores += tl.dot(query, tl.trans(key), input_precision=PRECISION)
    query_scale = tl.rsqrt(query_sum + NORM_EPS) / tl.sqrt(KEY * 1.0)
    key_scale = tl.rsqrt(key_sum + NORM_EPS)
    scales = scales_ptr + (start * NUM_HEADS + head) * 2 + number * (NUM_HEADS * 2)
    tl.store(scales, query_scale, mask=there)  # each head of the group stores the same
    tl.store(scales + 1, key_scale, mask=there)

    x = x_ptr + (start * NUM_HEADS + head) * ROWS + CHANNELS + GROUP * VALUE + own
    x += number * (NUM_HEADS * ROWS)
    decay_rate, bias = tl.load(decay_ptr + value_head), tl.load(bias_ptr + value_head)
    rate = 1 / (1 + tl.exp(-tl.load(x, mask=there, other=0.0).to(tl.float32)))
    decay = decay_of(tl.load(x + GROUP, mask=there, other=0.0), bias, decay_rate)
    total = tl.cumsum(tl.where(there, tl.maximum(decay, LEAST_DECAY), 0.0), 0)
    place = start * NUM_HEADS * GROUP + value_head
    tl.store(totals_ptr + place + number * (NUM_HEADS * GROUP), total, mask=there)
    faded = tl.exp(tl.where(later >= earlier, total[:, None] - total[None, :], float("-inf")))
    faded *= key_scale[None, :]
    chunk = chunks_ptr + place * 2 * CHUNK
    chunk += later * (NUM_HEADS * GROUP * 2 * CHUNK) + earlier
    tl.store(chunk + CHUNK, scores * faded * query_scale[:, None], mask=there[:, None])

    found = keys * faded * (key_scale * rate)[:, None]
    inverse = tl.where(later == earlier, 1.0, 0.0)
    inverse -= tl.where((later // 2 == earlier // 2) & (later > earlier), found, 0.0)
    for level in range(1, LEVELS):
        is_block = (later >> level + 1) == (earlier >> level + 1)
        is_lower = (later >> level) > (earlier >> level)
        lower = tl.where(is_block & is_lower, found, 0.0)
        added = tl.dot(lower, inverse, input_precision=PRECISION)
        inverse -= tl.dot(inverse, added, input_precision=PRECISION)
    tl.store(chunk, inverse * rate[None, :], mask=there[:, None])


@triton.jit(do_not_specialize=["first_part"])
def chunk_kernel(
    convolved_ptr, chunks_ptr, totals_ptr, scales_ptr, states_ptr, parts_ptr, first_part,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, KEY_TILE: tl.constexpr,
    CHUNK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One program goes through a part's chunks, for TILE numbers of a head's values, and writes its output over them.

    The state is held in tiles of KEY_TILE keys: a product of all keys would not leave registers for them.
    Nothing is loaded ahead: a second stage spills registers on Blackwell, and two programs share a multiprocessor.
    """
    value_head = tl.program_id(1)
    head, own = value_head // GROUP, value_head % GROUP
    CHANNELS: tl.constexpr = 2 * KEY + GROUP * VALUE
    KEY_TILES: tl.constexpr = (KEY + KEY_TILE - 1) // KEY_TILE
    number, i = tl.arange(0, CHUNK), tl.arange(0, KEY_TILE)
    d = tl.program_id(2) * TILE + tl.arange(0, TILE)
    first = parts_ptr + (first_part + tl.program_id(0)) * FIELDS
    start, end, source = tl.load(first), tl.load(first + 1), tl.load(first + 2)
    before = states_ptr + (source * NUM_HEADS * GROUP + value_head) * VALUE * KEY
    places = d[None, :] * KEY + i[:, None]
    is_value = (d < VALUE)[None, :]
    state = ()
    for tile in tl.static_range(KEY_TILES):
        is_held = (tile * KEY_TILE + i < KEY)[:, None] & is_value
        is_held &= source >= 0
        kept = tl.load(before + places + tile * KEY_TILE, mask=is_held, other=0.0)
        state += (kept,)  # type: ignore[assignment]  # a tuple of another length
    for begin in range(start, end, CHUNK):
        there = begin + number < end
        rows = convolved_ptr + (begin * NUM_HEADS + head) * CHANNELS
        rows += number[:, None] * (NUM_HEADS * CHANNELS)
        from_query = tl.zeros([CHUNK, TILE], tl.float32)
        from_key = tl.zeros([CHUNK, TILE], tl.float32)
        for tile in tl.static_range(KEY_TILES):
            inside = there[:, None] & (tile * KEY_TILE + i < KEY)[None, :]
            at = rows + tile * KEY_TILE + i[None, :]
            query = tl.load(at, mask=inside, other=0.0)
            key = tl.load(at + KEY, mask=inside, other=0.0)
            from_query += tl.dot(query, state[tile], input_precision=PRECISION)
            from_key += tl.dot(key, state[tile], input_precision=PRECISION)
        place = begin * NUM_HEADS * GROUP + value_head
        scales = scales_ptr + (begin * NUM_HEADS + head) * 2 + number * (NUM_HEADS * 2)
        query_scale = tl.load(scales, mask=there, other=0.0)
        key_scale = tl.load(scales + 1, mask=there, other=0.0)
        totals = totals_ptr + place + number * (NUM_HEADS * GROUP)
        total = tl.load(totals, mask=there, other=0.0)
        last_token = tl.minimum(begin + CHUNK, end) - 1
        last = tl.load(totals_ptr + last_token * NUM_HEADS * GROUP + value_head)
        faded = tl.exp(total)
        values = rows + 2 * KEY + own * VALUE + d[None, :]
        value = tl.load(values, mask=there[:, None] & is_value, other=0.0)
        chunk = chunks_ptr + place * 2 * CHUNK
        chunk += number[:, None] * (NUM_HEADS * GROUP * 2 * CHUNK) + number[None, :]
        inverse = tl.load(chunk, mask=there[:, None], other=0.0)
        wanted = value - (faded * key_scale)[:, None] * from_key
        added = tl.dot(inverse, wanted, input_precision=PRECISION)
        scores = tl.load(chunk + CHUNK, mask=there[:, None], other=0.0)
        found = (faded * query_scale)[:, None] * from_query
        found += tl.dot(scores, added, input_precision=PRECISION)
        tl.store(values, found, mask=there[:, None] & is_value)
        left = tl.exp(tl.where(there, last - total, 0.0)) * key_scale
        added *= left[:, None]
        after = ()
        for tile in tl.static_range(KEY_TILES):
            inside = there[:, None] & (tile * KEY_TILE + i < KEY)[None, :]
            at = rows + KEY + tile * KEY_TILE + i[None, :]
            key = tl.load(at, mask=inside, other=0.0)
            grown = tl.dot(tl.trans(key), added, input_precision=PRECISION)
            grown += state[tile] * tl.exp(last)
            after += (grown,)  # type: ignore[assignment]
        state = after
    for field in tl.static_range(3, 5):
        row = tl.load(first + field)
        into = states_ptr + (row * NUM_HEADS * GROUP + value_head) * VALUE * KEY
        for tile in tl.static_range(KEY_TILES):
            is_held = (tile * KEY_TILE + i < KEY)[:, None] & is_value
            tl.store(into + places + tile * KEY_TILE, state[tile], mask=is_held & (row >= 0))


@triton.jit(do_not_specialize=["first_token", "num_tokens"])
def gate_kernel(
    x_ptr, convolved_ptr, norm_ptr, out_ptr, first_token, num_tokens, eps,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, VALUE_PAD: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """One program normalises and gates what a head of values has found for some tokens."""
    value_head = tl.program_id(1)
    head, own = value_head // GROUP, value_head % GROUP
    CHANNELS: tl.constexpr = 2 * KEY + GROUP * VALUE
    ROWS: tl.constexpr = CHANNELS + GROUP * VALUE + 2 * GROUP
    token = first_token + tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    d = tl.arange(0, VALUE_PAD)
    inside = (token < num_tokens)[:, None] & (d < VALUE)[None, :]
    row = (token * NUM_HEADS + head)[:, None]
    at = own * VALUE + d[None, :]
    found = tl.load(convolved_ptr + row * CHANNELS + 2 * KEY + at, mask=inside, other=0.0)
    norm = tl.load(norm_ptr + d, mask=d < VALUE, other=0.0)
    found *= tl.rsqrt(tl.sum(found * found, 1) / VALUE + eps)[:, None] * norm[None, :]
    gate = tl.load(x_ptr + row * ROWS + CHANNELS + at, mask=inside, other=0.0).to(tl.float32)
    out = out_ptr + (token * NUM_HEADS * GROUP + value_head)[:, None] * VALUE + d[None, :]
    gated = found * gate / (1 + tl.exp(-gate))
    tl.store(out, gated.to(out_ptr.dtype.element_ty), mask=inside)


def delta_net(
    x: Tensor, memory: Sequence[Tensor], parts: Any, weights: Sequence[Tensor], heads: Any
) -> Tensor:
    """Compute what `mix` of engine.layers.gated_delta_net does, one wave of parts after the other."""
    num_heads = heads.num_heads
    channels = heads.num_channels
    seen, states = memory
    conv, decay, bias, norm = weights
    convolved = torch.empty((len(x), num_heads * channels), dtype=torch.float32, device=x.device)
    out = x.new_empty(len(x), num_heads * heads.group * heads.value_dim)
    num_decodes = len(parts.decodes)
    tile = min(128, triton.next_power_of_2(channels))
    sizes = {"NUM_HEADS": num_heads, "GROUP": heads.group, "KEY": heads.key_dim, "VALUE": heads.value_dim}  # fmt: skip
    key_pad = triton.next_power_of_2(heads.key_dim)
    value_pad = triton.next_power_of_2(heads.value_dim)
    for wave in parts.waves:
        convolve_kernel[(len(wave), num_heads, triton.cdiv(channels, tile))](
            x, seen, parts.table, conv, convolved, wave.start,
            NUM_HEADS=num_heads, ROWS=sum(heads.rows.values()), CHANNELS=channels, STEPS=heads.kernel_size - 1,
            TILE=tile, TOKENS=8, num_warps=max(1, tile // 32),
        )  # fmt: skip
    if num_decodes:
        correct_kernel[(num_decodes, num_heads * heads.group)](
            x, convolved, states, parts.table, decay, bias, norm, out, heads.eps, **sizes, KEY_PAD=key_pad,
            VALUE_PAD=value_pad, num_warps=min(16, max(1, key_pad * value_pad // 1024)),
        )  # fmt: skip
    if not parts.others:
        return out

    num_values = num_heads * heads.group
    chunks = torch.empty((len(x), num_values, 2, CHUNK), dtype=torch.float32, device=x.device)
    totals = torch.empty((len(x), num_values), dtype=torch.float32, device=x.device)
    scales = torch.empty((len(x), num_heads, 2), dtype=torch.float32, device=x.device)
    longest = max(part.end - part.start for part in parts.others)
    solve_kernel[(len(parts.others), triton.cdiv(longest, CHUNK), num_values)](
        x, convolved, chunks, totals, scales, parts.table, decay, bias, num_decodes, **sizes,
        KEY_TILE=KEY_TILE, CHUNK=CHUNK, LEVELS=CHUNK.bit_length() - 1, num_warps=2,
        num_stages=1,
    )  # fmt: skip
    value_tile = min(VALUE_TILE, max(16, value_pad))
    for wave in parts.waves:
        first_part = max(wave.start, num_decodes)
        if first_part == wave.stop:
            continue
        chunk_kernel[(wave.stop - first_part, num_values, triton.cdiv(heads.value_dim, value_tile))](
            convolved, chunks, totals, scales, states, parts.table, first_part, **sizes,
            KEY_TILE=KEY_TILE, CHUNK=CHUNK, TILE=value_tile, num_warps=4, num_stages=1,
        )  # fmt: skip
    gate_kernel[(triton.cdiv(len(x) - num_decodes, GATE_TOKENS), num_values)](
        x, convolved, norm, out, num_decodes, len(x), heads.eps, **sizes, VALUE_PAD=value_pad, TOKENS=GATE_TOKENS,
        num_warps=4,
    )  # fmt: skip
    return out
