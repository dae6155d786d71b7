"""Rotary position embedding, and its scalings for long contexts."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from reprlib import repr as brief  # short
from typing import Any

import torch
from torch import Tensor, nn

from engine.checkpoint.model_config import number, optional_number
from engine.errors import ConfigError, UnsupportedModel


@dataclass(frozen=True)
class Rope:
    """One rotation of queries and keys.

    kind: a key of SCALINGS, transformers' rope_type.
    rotary_dim: how many of a head's numbers are rotated, from the first on; even.
    theta: pair i of these turns by theta^(-2i / rotary_dim) for each position, before scaling.
    max_positions: the model's longest context, as in config.json.
    parameters: what the kind needs besides these, by their names in config.json.
    """

    kind: str
    rotary_dim: int
    theta: float
    max_positions: int
    parameters: Mapping[str, Any]

    def frequencies(self, longest: int) -> tuple[Tensor, float]:
        """Return the angles of one position, [rotary_dim / 2] float32, and the factor for cosines and sines.

        longest: the tokens of the longest sequence. Raises UnsupportedModel if SCALINGS lacks the kind, or ConfigError
        for a wrong parameter.
        """
        if self.kind not in SCALINGS:
            raise UnsupportedModel(
                f"rope type {self.kind!r} is not supported natively; supported: {', '.join(SCALINGS)}"
            )
        return SCALINGS[self.kind](self, longest)

    def number(self, name: str) -> float:
        """Return a parameter, a number above 0. Raises ConfigError, or KeyError if it is not there."""
        return number(self.parameters, name)

    def optional(self, name: str) -> float | None:
        """Return a parameter, None if it is not there. Raises ConfigError unless it is a number above 0."""
        return optional_number(self.parameters, name)

    def factors(self, name: str) -> Tensor:
        """Return a parameter that is a list: one number above 0 for each pair."""
        value = self.parameters.get(name)
        if (
            not isinstance(value, list)
            or len(value) != self.rotary_dim // 2
            or not all(type(factor) in (int, float) and 0 < factor < math.inf for factor in value)
        ):
            raise ConfigError(
                f"config.json: rope parameter {name} must hold {self.rotary_dim // 2} numbers above 0, "
                f"got {brief(value)}"
            )
        return torch.tensor(value, dtype=torch.float32, device="cpu")


def _powers(rope: Rope, theta: float) -> Tensor:
    exponents = (
        torch.arange(0, rope.rotary_dim, 2, dtype=torch.int64, device="cpu").float()
        / rope.rotary_dim
    )
    powers: Tensor = theta**exponents
    return powers


def _default(rope: Rope, longest: int) -> tuple[Tensor, float]:
    return 1.0 / _powers(rope, rope.theta), 1.0


def _linear(rope: Rope, longest: int) -> tuple[Tensor, float]:
    """Divide all frequencies by the factor, as if the positions were divided."""
    return 1.0 / _powers(rope, rope.theta) / rope.number("factor"), 1.0


def _dynamic(rope: Rope, longest: int) -> tuple[Tensor, float]:
    """Enlarge theta if `longest` exceeds the configured length. Shorter sequences get the same theta."""
    factor = rope.number("factor")
    dim = rope.rotary_dim
    theta_factor = (factor * max(longest, rope.max_positions) / rope.max_positions) - (factor - 1)
    return 1.0 / _powers(rope, rope.theta * theta_factor ** (dim / (dim - 2))), 1.0


def _yarn(rope: Rope, longest: int) -> tuple[Tensor, float]:
    """Keep fast frequencies, divide slow ones by the factor, with a ramp between. Source: arXiv:2309.00071."""
    factor = rope.number("factor")
    dim = rope.rotary_dim
    original = rope.number("original_max_position_embeddings")

    # the pair that makes this many rotations over the original context
    def pair_turning(rotations: float) -> float:
        return (dim * math.log(original / (rotations * 2 * math.pi))) / (2 * math.log(rope.theta))

    low = pair_turning(rope.optional("beta_fast") or 32)
    high = pair_turning(rope.optional("beta_slow") or 1)
    if rope.parameters.get("truncate", True):
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float32, device="cpu") - low) / (
        high - low if high != low else 0.001
    )
    fast_share = 1 - ramp.clamp(0, 1)
    powers = _powers(rope, rope.theta)
    frequencies = 1.0 / (factor * powers) * (1 - fast_share) + 1.0 / powers * fast_share
    return frequencies, _yarn_attention_factor(rope, factor)


def _yarn_attention_factor(rope: Rope, factor: float) -> float:
    def magnitude(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    configured = rope.optional("attention_factor")
    if configured is not None:
        return configured
    mscale = rope.optional("mscale")
    mscale_all_dim = rope.optional("mscale_all_dim")
    if mscale and mscale_all_dim:
        return magnitude(mscale) / magnitude(mscale_all_dim)
    return magnitude(1)


def _longrope(rope: Rope, longest: int) -> tuple[Tensor, float]:
    """Divide each pair's frequency by its factor for the longest sequences that may come. Source: arXiv:2402.13753."""
    original = rope.number("original_max_position_embeddings")
    factor = rope.optional("factor") or rope.max_positions / original
    attention_factor = rope.optional("attention_factor")
    if attention_factor is None:
        attention_factor = (
            1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original))
        )
    factors = {name: rope.factors(name) for name in ("short_factor", "long_factor")}
    chosen = factors["long_factor" if longest > original else "short_factor"]
    return 1.0 / (chosen * _powers(rope, rope.theta)), attention_factor


def _llama3(rope: Rope, longest: int) -> tuple[Tensor, float]:
    """Keep short wavelengths, multiply long ones by the factor, and those between by a part of it."""
    factor = rope.number("factor")
    original = rope.number("original_max_position_embeddings")
    slow = rope.number("low_freq_factor")
    fast = rope.number("high_freq_factor")
    if fast <= slow:
        raise ConfigError(
            f"config.json: rope parameter high_freq_factor must exceed low_freq_factor, got {fast} and {slow}"
        )
    frequencies = 1.0 / _powers(rope, rope.theta)
    waves = 2 * math.pi / frequencies
    stretched = torch.where(waves > original / slow, frequencies / factor, frequencies)
    share = (original / waves - slow) / (fast - slow)
    between = (1 - share) * stretched / factor + share * stretched
    is_between = ~(waves < original / fast) & ~(waves > original / slow)
    return torch.where(is_between, between, stretched), 1.0


SCALINGS: dict[str, Callable[[Rope, int], tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "llama3": _llama3,
}


class RotaryEmbedding(nn.Module):
    """Rotates pairs (i, i + dim / 2) of a head's first `dim` numbers by position * frequency of the pair.

    `table` [positions, 2, dim]: cosines and sines, computed in float32 once and kept in `dtype`.
    Source: arXiv:2104.09864.
    """

    table: Tensor

    def __init__(
        self, rope: Rope, max_positions: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        """max_positions: the most tokens that a sequence may have."""
        super().__init__()
        frequencies, factor = rope.frequencies(max_positions)
        positions = torch.arange(max_positions, dtype=torch.float32, device=device)
        angles = torch.outer(positions, frequencies.to(device))
        angles = torch.cat((angles, angles), dim=-1)
        cosines = angles.cos().mul_(factor)
        sines = angles.sin().mul_(factor)
        self.table = torch.stack((cosines, sines), dim=1).to(dtype)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cosines and the sines of positions [tokens] int64, each [tokens, 1, dim]."""
        cos, sin = self.table[positions].unsqueeze(2).unbind(1)
        return cos, sin


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [tokens, heads, head_dim]. A head's numbers beyond the width of cos and sin stay as they are."""
    turning, still = x.tensor_split([cos.shape[-1]], dim=-1)
    first, second = turning.chunk(2, dim=-1)
    turned = (turning * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)
    return torch.cat((turned, still), dim=-1) if still.shape[-1] else turned
