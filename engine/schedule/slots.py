"""SlotTable: the running sequences' state as arrays, one row per slot, updated in place.

A step's batch is cut out of these rows by a few numpy operations, whatever the number of sequences or
tokens; nothing is rebuilt per token in Python. They are a copy: the Sequence rules, and what the
scheduler changes of one that runs it changes here in the same call.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine.sampling.sampling_batch import neutral_rows, sampling_row
from engine.schedule.sequence import Sequence


class SlotTable:
    """Arrays of max_num_seqs rows. The scheduler writes them, it and `step_batch` read.

    token_ids: [slots, max_model_len] int32, prompt and completion as far as they are known.
    block_tables: [slots, max_blocks] int32.
    num_tokens, num_computed: [slots] int64, with pending tokens and launched steps counted in.
    num_known: [slots] int64, tokens whose id is in token_ids.
    sample_place: [slots] int64, which of the samples of the last step it sampled in is the sequence's.
    num_prompt: [slots] int64, tokens of the prompt.
    min_len: [slots] int64, tokens before which no end token may come.
    sampling: [slots] of sampling_batch.ROW, what the sampler reads of each sequence.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        # zeros, not empty: the rows cost no memory before they are touched
        self.token_ids: NDArray[np.int32] = np.zeros((max_num_seqs, max_model_len), np.int32)
        max_blocks = -(-max_model_len // block_size)
        self.block_tables: NDArray[np.int32] = np.zeros((max_num_seqs, max_blocks), np.int32)
        self.num_tokens: NDArray[np.int64] = np.zeros(max_num_seqs, np.int64)
        self.num_computed: NDArray[np.int64] = np.zeros(max_num_seqs, np.int64)
        self.num_known: NDArray[np.int64] = np.zeros(max_num_seqs, np.int64)
        self.sample_place: NDArray[np.int64] = np.zeros(max_num_seqs, np.int64)
        self.num_prompt: NDArray[np.int64] = np.zeros(max_num_seqs, np.int64)
        self.min_len: NDArray[np.int64] = np.zeros(max_num_seqs, np.int64)
        self.sampling = neutral_rows(max_num_seqs)
        self.stop_token_ids: list[frozenset[int]] = [frozenset()] * max_num_seqs
        self.block_size = block_size
        self._free = list(range(max_num_seqs - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Slots no sequence holds."""
        return len(self._free)

    def assign(self, seq: Sequence) -> None:
        """Give `seq` a slot and write its whole state; it has its blocks, and no pending token."""
        assert not seq.num_pending_tokens, f"{seq!r} has a token that no slot remembers the place of"
        slot = seq.slot = self._free.pop()
        self.token_ids[slot, : seq.num_tokens] = seq.token_ids
        self.block_tables[slot, : len(seq.block_table)] = seq.block_table
        self.num_tokens[slot] = self.num_known[slot] = seq.num_tokens
        self.num_computed[slot] = seq.num_computed_tokens
        self.num_prompt[slot] = seq.num_prompt_tokens
        self.min_len[slot] = seq.num_prompt_tokens + seq.params.min_tokens
        self.sampling[slot] = sampling_row(seq.params, seq.seed, seq.index)
        self.stop_token_ids[slot] = seq.stop_token_ids

    def release(self, seq: Sequence) -> None:
        """Take the slot of `seq` back."""
        self._free.append(seq.slot)
        seq.slot = -1

    def add_block(self, seq: Sequence) -> None:
        """Write the block that was just appended to the table of `seq`."""
        self.block_tables[seq.slot, len(seq.block_table) - 1] = seq.block_table[-1]

    def advance(
        self, slots: NDArray[np.int64], num_new_tokens: NDArray[np.int64], samples: NDArray[np.bool_]
    ) -> None:
        """Count what a launched step computes for these slots, and a pending token where it samples."""
        self.num_computed[slots] += num_new_tokens
        sampling = slots[samples]
        self.num_tokens[sampling] += 1
        self.sample_place[sampling] = np.arange(len(sampling))

    def add_known(self, slots: NDArray[np.int64], token_ids: NDArray[np.int64]) -> None:
        """Write the first pending token of each of these slots."""
        self.token_ids[slots, self.num_known[slots]] = token_ids
        self.num_known[slots] += 1
