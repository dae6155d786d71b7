"""ScheduledBatch: the scheduler's choice for one step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from engine.schedule.block_manager import Block, BlockCopy
from engine.schedule.drafts import Drafted, Drafts
from engine.schedule.lanes import SlotGroup
from engine.schedule.sequence import Sequence
from engine.schedule.snapshots import StateMoves


@dataclass
class ScheduledBatch:
    """The work of one step: one token of each of `decodes`, `prefill_lens[i]` tokens of `prefills[i]`.

    A sequence with all tokens computed samples its next one, if it generates: each of `decodes`, and `prefills[i]`
    if `prefill_samples[i]` says so. num_decode_tokens: those of `decodes` and `drafted`, guesses not counted.
    decode_slots: [decodes] int64. published: blocks that can be hit from this step on. copies: made before anything
    is computed.
    states: None if the model keeps none.
    drafted: sequences with guesses, behind all others. Each has a row for its last token and one for each guess, and
    every such row samples.
    scored, pooled: set once the step is built: the sequences that score or are pooled, and how many tokens of each.
    launched: whether `advance` has counted the step. Only then are these set: generations, [samples] int64, of
    SlotTable, and ending, the sequences that sample nothing and end with this step.
    """

    decodes: list[Sequence] = field(default_factory=list)
    prefills: list[Sequence] = field(default_factory=list)
    prefill_lens: list[int] = field(default_factory=list)
    prefill_samples: list[bool] = field(default_factory=list)
    num_tokens: int = 0
    num_decode_tokens: int = 0
    decode_slots: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    generations: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    published: list[Block] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    states: StateMoves | None = None
    drafted: list[Drafted] = field(default_factory=list)
    ending: list[Sequence] = field(default_factory=list)
    scored: list[tuple[Sequence, int]] = field(default_factory=list)
    pooled: list[tuple[Sequence, int]] = field(default_factory=list)
    launched: bool = False

    def add_decodes(self, group: SlotGroup) -> None:
        """Compute one generated token of each of `group`."""
        self.decodes += group.seqs
        self.decode_slots = np.concatenate((self.decode_slots, group.slots))
        self.num_tokens += len(group.seqs)
        self.num_decode_tokens += len(group.seqs)

    def add_guesses(self, guesses: list[list[int]], drafts: Drafts) -> None:
        """Have the step compute guesses behind the last tokens of `decodes`. guesses: of each sequence, maybe none."""
        is_drafted = np.array([bool(guess) for guess in guesses])
        self.drafted = [
            Drafted(self.decodes[i], guesses[i], drafts)
            for i in np.flatnonzero(is_drafted).tolist()
        ]
        self.decodes = [self.decodes[i] for i in np.flatnonzero(~is_drafted).tolist()]
        self.decode_slots = self.decode_slots[~is_drafted]
        self.num_tokens += sum(map(len, guesses))

    def add_prefill(self, seq: Sequence, num_new_tokens: int) -> None:
        """Compute the next `num_new_tokens` tokens of `seq`."""
        self.prefills.append(seq)
        self.prefill_lens.append(num_new_tokens)
        is_last = seq.num_computed_tokens + num_new_tokens == seq.num_tokens
        self.prefill_samples.append(is_last and seq.generates)
        self.num_tokens += num_new_tokens

    def split(self) -> tuple[ScheduledBatch, ScheduledBatch]:
        """Split a step that is not launched into two, which do the same if they run in this order.

        The first needs nothing of the second: within a step, a sequence only shares blocks of sequences before it.
        """

        def part(decodes: slice, prefills: slice) -> ScheduledBatch:
            """Return a step of these decodes and prefills, without copies and published blocks."""
            return ScheduledBatch(
                self.decodes[decodes],
                self.prefills[prefills],
                self.prefill_lens[prefills],
                self.prefill_samples[prefills],
                decode_slots=self.decode_slots[decodes],
                num_tokens=len(self.decodes[decodes]) + sum(self.prefill_lens[prefills]),
                states=self.states,
                num_decode_tokens=len(self.decodes[decodes]),
            )

        middle = len(self.seqs) // 2
        prefill_middle = max(0, middle - len(self.decodes))
        first = part(slice(middle), slice(prefill_middle))
        second = part(slice(middle, None), slice(prefill_middle, None))
        first_block_ids = {block_id for seq in first.seqs for block_id in seq.block_table}
        for copy in self.copies:
            owner = first if copy.target in first_block_ids else second
            owner.copies.append(copy)
        for block in self.published:
            owner = first if block.block_id in first_block_ids else second
            owner.published.append(block)
        return first, second

    @cached_property
    def seqs(self) -> list[Sequence]:
        """The step's sequences, to be read once all are scheduled: decodes first, those with guesses last."""
        return self.decodes + self.prefills + [draft.seq for draft in self.drafted]

    @cached_property
    def slots(self) -> NDArray[np.int64]:
        """[seqs] int64, the slot of each while this step is built and launched."""
        later_seqs = self.seqs[len(self.decodes) :]
        return np.concatenate(
            (self.decode_slots, np.array([seq.slot for seq in later_seqs], np.int64))
        )

    @cached_property
    def num_new_tokens(self) -> NDArray[np.int64]:
        """[seqs] int64, how many tokens to compute for each sequence."""
        later_lens = self.prefill_lens + [1 + len(draft.guesses) for draft in self.drafted]
        return np.concatenate((np.ones_like(self.decode_slots), np.array(later_lens, np.int64)))

    @cached_property
    def samples(self) -> NDArray[np.bool_]:
        """[seqs] bool, whether each sequence samples exactly one token; False for those with guesses."""
        num_decodes = len(self.decodes)
        samples = np.zeros(len(self.seqs), np.bool_)
        samples[:num_decodes] = True
        samples[num_decodes : num_decodes + len(self.prefills)] = self.prefill_samples
        return samples

    @cached_property
    def sampling(self) -> list[Sequence]:
        """The sequences that sample one token, in the order of `seqs`."""
        return self.decodes + [seq for seq, _, samples in self.each_prefill() if samples]

    @cached_property
    def sampling_slots(self) -> NDArray[np.int64]:
        """[samples] int64, the slots of `sampling` when the step is launched."""
        return self.slots[self.samples]

    @property
    def has_prompts(self) -> bool:
        """Whether any of `prefills` computes a prompt, and not forced tokens alone."""
        return any(seq.num_computed_tokens < seq.num_prompt_tokens for seq in self.prefills)

    @cached_property
    def num_guessed(self) -> int:
        """The number of rows of `drafted`: each sequence's last token, and its guesses."""
        return sum(1 + len(draft.guesses) for draft in self.drafted)

    def each_prefill(self) -> Iterator[tuple[Sequence, int, bool]]:
        """Yield each of `prefills`, how many of its tokens to compute, and whether it then samples."""
        return zip(self.prefills, self.prefill_lens, self.prefill_samples, strict=True)
