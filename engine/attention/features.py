"""A layer's kind of attention, as data that every backend reads."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any


@dataclass(frozen=True)
class AttentionFeatures:
    """One layer's attention, as one rank computes it.

    num_heads, num_kv_heads: this rank's; heads are grouped over the KV heads in order.
    head_dim: of queries, keys and values alike.
    scale: scores are queries times keys times this.
    window: tokens that a query sees, itself included; None if it sees all before it.
    chunk: tokens of a chunk (Llama 4): a sequence is cut into chunks, and a query sees no tokens of earlier ones;
        None if there are none.
    soft_cap: scores become soft_cap * tanh(score / soft_cap), before the mask (Gemma 2); None if not.
    has_sinks: whether each head has a sink (gpt-oss), a learned score that takes part in the softmax and has
        no value. The scores are a weight: they are passed beside this.
    has_slopes: whether each head has a slope (ALiBi): after the soft cap, slope * distance is subtracted from a score.
        The slopes are passed beside this too.
    is_indexed: whether a query sees only tokens that an index chooses, which are passed beside this.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    chunk: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False
    has_slopes: bool = False
    is_indexed: bool = False

    @property
    def sees_all(self) -> bool:
        """Return whether neither a window nor a chunk hides tokens that come before a query."""
        return self.window is None and self.chunk is None

    @cached_property
    def options(self) -> dict[str, Any]:
        """The keyword arguments that attention kernels take beside tensors."""
        return {name: getattr(self, name) for name in ("scale", "window", "chunk", "soft_cap")}
