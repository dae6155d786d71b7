"""PromptMeter: what a process tells of prompts without answering them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class PromptMeter:
    """What the engine of a process makes of prompts.

    token_ids: those of a prompt, or of a chat's messages with its options (as in tasks.Request, and
    truncate_prompt_tokens, which a text has too); for any thread. Raises InvalidJob with the reason for which
    the engine would refuse it.
    max_num_seqs: rows in the batch at a time. block_size: tokens that the prefix cache shares at once.
    num_blocks: of so many tokens each, in the KV pool.
    """

    token_ids: Callable[[str | None, list[dict[str, Any]] | None, Mapping[str, Any]], Sequence[int]]
    max_num_seqs: int
    block_size: int
    num_blocks: int
