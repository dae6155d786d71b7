"""What the layers' kernels compute, written plainly in float64; and how far rounding takes a result from that.

Attention is in tests/engine/paged.py.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention.kv_cache import FP8
from engine.kernels.attention.kv_tile import INTERPRETED

#: The most that rounding changes a number, as a share of it: a half of the last digit. Triton's interpreter cuts the
#: digits off that bfloat16 lacks, which changes a number by a whole last digit at most.
ROUNDING = {
    torch.bfloat16: 2.0**-7 if INTERPRETED else 2.0**-8,
    torch.float16: 2.0**-11,
    FP8: 2.0**-4,
}
#: The same of what is computed in float32: the roundings of a thousand terms, 2**-24 each, none of which cancels.
FLOAT32 = 2.0**-14


def share_of_rounding(found: Tensor, expected: Tensor, inside: Tensor | None = None) -> float:
    """The largest error of a row, as a share of what rounding explains; infinity where a number is NaN.

    A row is what stands in the last dimension; its error is the length of the difference. Rounding changes each
    number of the result by ROUNDING of itself at most, so it changes a row by that share of the row's length.
    inside: what else is rounded to the result's dtype, in the same way: of a sum of parts that are rounded one by one,
    the root of the sum of their squares. Their roundings are independent, so their squares add up.
    """
    expected = expected.double()
    difference = (found.to(expected.device).double() - expected).norm(dim=-1)
    length = expected.norm(dim=-1)
    if inside is not None:
        length = length + inside.norm(dim=-1)
    allowed = (ROUNDING[found.dtype] + FLOAT32) * length
    # a row of zeros must be exact
    share = torch.where(difference == 0.0, 0.0, difference / allowed)
    return float(share.nan_to_num(float("inf")).max())


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The norm of the last dimension."""
    x = x.double()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.double()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + width / 2) of heads [tokens, heads, dim]; numbers behind the width stay."""
    width = cos.shape[-1]
    half = width // 2
    x, cos, sin = x.double(), cos.double(), sin.double()
    rotated = x.clone()
    rotated[..., :half] = x[..., :half] * cos[..., :half] - x[..., half:width] * sin[..., :half]
    rotated[..., half:width] = (
        x[..., half:width] * cos[..., half:] + x[..., :half] * sin[..., half:]
    )
    return rotated


def gelu_tanh(x: Tensor) -> Tensor:
    """gelu by its approximation with tanh."""
    return 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))


def clamped_swiglu(gate: Tensor, up: Tensor, alpha: float, limit: float) -> Tensor:
    """gpt-oss' activation."""
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + 1)


def grouped_product(x: Tensor, weight: Tensor, bias: Tensor | None, counts: list[int]) -> Tensor:
    """Rows by the transposed weight of their expert. counts: the rows of each expert, which follow each other."""
    products = []
    for expert, rows in enumerate(x.split(counts)):
        product = rows.double() @ weight[expert].double().T
        products.append(product if bias is None else product + bias[expert].double())
    return torch.cat(products)


def delta_net(
    x: Tensor,
    memory: tuple[Tensor, Tensor],
    parts: list[tuple[int, ...]],
    weights: tuple[Tensor, ...],
    eps: float,
) -> tuple[Tensor, Tensor]:
    """The gated delta rule of arXiv:2412.06464, one token after the other.

    x: [tokens, heads, rows], a head's rows being its query, key and values, which are convolved, then gates, rates and
    decays. memory: the convolution's tokens [states, heads, steps, channels], and matrices [states, heads, group,
    value_dim, key_dim]; -1 begins with zeros. parts: start, end, the state before, the state behind, and a copy of it.
    weights: the convolution's [heads, steps + 1, channels], decays and their biases [heads, group], norm [value_dim].
    Returns the output [tokens, heads, group, value_dim], and the matrices behind the parts.
    """
    conv, decay_rate, decay_bias, norm = (weight.double() for weight in weights)
    x = x.double()
    kept = memory[0].double().clone()
    states = memory[1].double().clone()
    group, value_dim, key_dim = states.shape[2:]
    channels = conv.shape[2]
    out = x.new_zeros(len(x), *states.shape[1:4])
    for start, end, source, *targets in parts:
        window = torch.zeros_like(kept[0]) if source < 0 else kept[source]
        state = torch.zeros_like(states[0]) if source < 0 else states[source].clone()
        for token in range(start, end):
            convolved, gate, rate, decay = x[token].split(
                (channels, group * value_dim, group, group), dim=-1
            )
            window = torch.cat((window, convolved[:, None]), dim=1)
            mixed = F.silu((window * conv).sum(1))
            window = window[:, 1:]
            query, key, value = mixed.split((key_dim, key_dim, group * value_dim), dim=-1)
            query = query * torch.rsqrt(query.square().sum(-1, keepdim=True) + 1e-6) / key_dim**0.5
            key = key * torch.rsqrt(key.square().sum(-1, keepdim=True) + 1e-6)
            state = state * torch.exp(decay_rate * F.softplus(decay + decay_bias))[..., None, None]
            held = torch.einsum("hgvk,hk->hgv", state, key)
            added = (value.view_as(held) - held) * rate.sigmoid()[..., None]
            state = state + torch.einsum("hgv,hk->hgvk", added, key)
            found = torch.einsum("hgvk,hk->hgv", state, query)
            out[token] = rms_norm(found, norm, eps) * F.silu(gate.view_as(found))
        for target in targets:
            if target >= 0:
                kept[target], states[target] = window, state
    return out, states
