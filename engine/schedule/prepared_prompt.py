"""PreparedPrompt: a request that another thread prepares for the engine. It needs neither torch nor numpy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from engine.schedule.pictures import PromptPictures
    from engine.schedule.score_tree import TreeShape


ROOT = 0
"""Stands before the first block of a sequence without an adapter, as its parent's hash and its parent's content."""


class BlockKey(NamedTuple):
    """Identity of one full block of a sequence: the hash of its whole prefix, and its own tokens."""

    hash: int
    tokens: bytes


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """A prompt after all work that grows with its length. `Engine.prepare` makes it.

    token_ids: checked. block_keys: of its full blocks, none if prefixes are not cached. continued: the tree of the
    continuations to score; num_prompt_tokens then counts the prompt's own tokens. pictures: those in the prompt.
    root: of the request's adapter, see Sequence.
    """

    token_ids: list[int]
    block_keys: list[BlockKey]
    continued: TreeShape | None = None
    num_prompt_tokens: int = 0
    pictures: PromptPictures | None = None
    root: int = ROOT
