"""ScheduledBatch: the scheduler's choice for one step."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from engine.block_manager import Block
from engine.sequence import Sequence, SequenceStatus


@dataclass
class ScheduledBatch:
    """What one step computes: one token of each of `decodes`, `prefill_lens[i]` tokens of `prefills[i]`.

    A sequence of which every token is then computed samples its next one: `sampling`, in the order of
    `seqs`, known once the step is launched. num_decode_tokens: those of `decodes` that were generated; a
    prompt's last chunk may be one token too. published: blocks that can be hit from this step on.
    """

    decodes: list[Sequence] = field(default_factory=list)
    prefills: list[Sequence] = field(default_factory=list)
    prefill_lens: list[int] = field(default_factory=list)
    num_tokens: int = 0
    num_decode_tokens: int = 0
    published: list[Block] = field(default_factory=list)
    sampling: list[Sequence] = field(default_factory=list)

    def add_prefill(self, seq: Sequence, num_new_tokens: int) -> None:
        """Compute the next `num_new_tokens` tokens of `seq`."""
        self.prefills.append(seq)
        self.prefill_lens.append(num_new_tokens)
        self.num_tokens += num_new_tokens

    @cached_property
    def seqs(self) -> list[Sequence]:
        """All sequences of the step, decodes first. Once it is scheduled, as the properties that follow."""
        return self.decodes + self.prefills

    @cached_property
    def slots(self) -> NDArray[np.int64]:
        """[seqs] int64, the slot of each while this step is built and launched."""
        return np.array([seq.slot for seq in self.seqs], np.int64)

    @cached_property
    def num_new_tokens(self) -> NDArray[np.int64]:
        """[seqs] int64, the tokens to compute for each."""
        return np.array([1] * len(self.decodes) + self.prefill_lens, np.int64)

    @property
    def num_dropped(self) -> int:
        """Generated tokens that this step has computed for sequences that are gone."""
        gone = [seq for seq in self.decodes if seq.status is SequenceStatus.FINISHED]
        return sum(len(seq.token_ids) > seq.num_prompt_tokens for seq in gone)
