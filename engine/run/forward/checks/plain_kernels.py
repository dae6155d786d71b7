"""The counterpart of each GPU kernel in plain torch, with which a check compares the kernel."""

import torch
from torch import Tensor, nn

from engine.attention.decode_state import PADDING, DecodeState, RowMemory, RowWrites
from engine.attention.kv_cache import LayerKVCache
from engine.kernels.products.codes import BITS, NUMBERS
from engine.kernels.upload import upload
from engine.layers.grouped_linear import ExpertGroups, GroupedLinear
from engine.layers.rotary import apply_rotary
from engine.layers.stream import RMSNorm

#: The place of each column's code in a word, as engine.layers.packed packs it.
HALF_BYTE_SHIFTS = (0, 16, 4, 20, 8, 24, 12, 28)
BYTE_SHIFTS = (0, 16, 8, 24)


def plain_norm(weight: Tensor, eps: float) -> RMSNorm:
    """Return an RMS norm with this weight."""
    norm = RMSNorm(len(weight), eps, dtype=weight.dtype)
    norm.weight = nn.Parameter(weight, requires_grad=False)
    return norm


def plain_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the norm of x."""
    normed: Tensor = plain_norm(weight, eps)(x)
    return normed


def plain_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return the norm of x + residual, and x + residual."""
    return plain_norm(weight, eps).add_and_norm(x, residual)


def plain_norm_rotate_and_store(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rotation: tuple[Tensor, Tensor],
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    cache: LayerKVCache,
    slot_mapping: Tensor,
) -> Tensor:
    """Return queries that are normalised and rotated; write keys and values to their slots."""
    if norms is not None:
        query = plain_rms_norm(query, norms[0], eps)
        key = plain_rms_norm(key, norms[1], eps)
    cache.write(apply_rotary(key, *rotation), value, slot_mapping)
    return apply_rotary(query, *rotation)


def plain_group(chosen: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the fields of ExpertGroups for these choices."""
    groups = ExpertGroups.of(chosen, num_experts)
    return groups.tokens, groups.places, groups.ends


def plain_grouped_product(x: Tensor, weight: Tensor, bias: Tensor | None, ends: Tensor) -> Tensor:
    """Multiply rows that are sorted by expert with their expert's weight."""
    places = torch.empty(0, dtype=torch.int64, device=x.device)  # none: the rows are sorted already
    product: Tensor = GroupedLinear(nn.Parameter(weight, requires_grad=False), None)(
        x, bias, ExpertGroups(places, places, ends)
    )
    return product


def plain_packed_product(
    x: Tensor,
    words: Tensor,
    scales: Tensor,
    zeros: Tensor,
    bias: Tensor | None,
    out_features: int,
    block: int,
    kind: str,
) -> Tensor:
    """Unpack a weight that Triton's `lay_out` has laid out, and multiply with it."""
    shifts, mask = (HALF_BYTE_SHIFTS, 15) if BITS[kind] == 4 else (BYTE_SHIFTS, 255)
    codes = torch.stack([(words >> shift) & mask for shift in shifts], -1).flatten(1)
    group = codes.shape[1] // len(scales)
    if kind == "fp8":
        values = codes.to(torch.uint8).view(torch.float8_e4m3fn).float()
    elif kind in NUMBERS:
        values = torch.tensor(NUMBERS[kind], dtype=x.dtype, device=codes.device)[codes].float()
    else:
        values = codes.float() - zeros.t().repeat_interleave(group, 1)
    weight = values * scales.t().float().repeat_interleave(group, 1)
    return nn.functional.linear(x.float(), weight, None if bias is None else bias.float()).to(
        x.dtype
    )


def plain_grouped_packed_product(
    x: Tensor,
    words: Tensor,
    scales: Tensor,
    zeros: Tensor,
    bias: Tensor | None,
    ends: Tensor,
    out_features: int,
    block: int,
    kind: str,
) -> Tensor:
    """Multiply rows that are sorted by expert with their expert's packed weight."""
    products = []
    start = 0
    for expert, end in enumerate(ends.tolist()):
        product = plain_packed_product(
            x[start:end],
            words[expert],
            scales[expert],
            zeros[expert],
            None if bias is None else bias[expert],
            out_features,
            block,
            kind,
        )
        products.append(product)
        start = end
    return torch.cat(products)


def plain_advance(state: DecodeState) -> None:
    """Make the inputs of the step that a decode batch's rows are at, and move the rows on."""
    is_real = state.next_positions != PADDING
    position = state.next_positions.clamp(min=0)
    columns = (position // state.block_size).unsqueeze(1)
    blocks = state.block_tables.gather(1, columns).squeeze(1).long()
    slots = blocks * state.block_size + position % state.block_size
    state.token_ids.copy_(torch.where(is_real, state.next_token_ids.clamp(min=0), 0))
    state.positions.copy_(position)
    state.slot_mapping.copy_(torch.where(is_real, slots, -1))
    state.context_lens.copy_((position + 1) * is_real)
    state.sampling.position.copy_(position + 1)
    state.next_positions.add_(is_real)


def plain_write_rows(memory: RowMemory, writes: RowWrites, sampled: Tensor | None) -> None:
    """Write the host's changes to a decode batch's rows. sampled: the tokens of the step before."""
    rows, wide, narrow, sampled_at, table_places, block_ids, order = upload(
        writes, memory.wide.device
    )
    memory.block_tables.view(-1).index_copy_(0, table_places, block_ids)
    if len(order):
        memory.order.copy_(order)
    pending = sampled_at >= 0
    # before the rows are written that they may lie in
    tokens = None if sampled is None else sampled[sampled_at[pending]]
    memory.wide.index_copy_(1, rows, wide)
    memory.narrow.index_copy_(1, rows, narrow)
    if tokens is not None:
        memory.wide[0].index_copy_(0, rows[pending], tokens)
