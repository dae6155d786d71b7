"""PreparedPrompt: what is made of a request beside the engine's thread. It needs neither torch nor numpy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class BlockKey(NamedTuple):
    """Identity of one full block of a sequence: the hash of its whole prefix, and its own tokens."""

    hash: int
    tokens: bytes


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """A prompt with all done to it that takes time with its length: what `Engine.prepare` makes.

    token_ids: checked. block_keys: of its full blocks, none where prefixes are not cached.
    """

    token_ids: list[int]
    block_keys: list[BlockKey]
