"""SlotTable: the running sequences' state as arrays, one row per slot, updated in place.

A step's batch is cut out of these rows by a few numpy operations, whatever the number of sequences or tokens.
The rows are a copy: the scheduler changes the Sequence and its row in the same call.
"""

import numpy as np
from numpy.typing import NDArray

from engine.sampling.sampling_batch import neutral_rows, sampling_row
from engine.schedule.logprobs import NOT_WANTED
from engine.schedule.sequence import NO_ADAPTER, Sequence

NO_TOKEN = -1


class SlotTable:
    """Arrays of max_num_seqs rows, [slots] int64 unless stated otherwise. The scheduler writes them.

    token_ids: [slots, max_model_len] int32, prompt and completion as far as they are known.
    block_tables: [slots, max_blocks] int32.
    num_tokens: all tokens, with the pending ones.  num_computed: tokens computed by launched steps.
    num_known: tokens whose id is in token_ids.  num_prompt: tokens of the prompt.
    sample_place: the index of the sequence's sample among those of the last step in which it sampled.
    min_len: the number of tokens before which no end token may come.  max_len: the number at which the sequence ends.
    end_token_ids: [slots, most of any sequence], the ids that end each, NO_TOKEN after the last.
    is_watched: [slots] bool, whether a stop string or a grammar may end the sequence too, or a token may force others.
    is_edited: [slots] bool, whether the sequence may have edits of its logits, apart from the bans of min_tokens.
    is_constrained: [slots] bool, whether the sequence follows a grammar, which must know each token before the next.
    is_free: [slots] bool, whether no edits depend on the tokens before, and no pictures shift positions.
    generations: a new number each time that a slot is given or rewritten, -1 in a free slot. While the number stays the
    same, the slot belongs to the same sequence, its tokens are those that were sampled, and its block table changes
    only at its end, where blocks are added.
    sampling: [slots] of sampling_batch.ROW, what the sampler reads of each sequence.
    sample_top: as in Sequence.
    adapter: as in Sequence.
    shift: what to add to the index of a token behind the prompt to get its position, from PromptPictures.
    num_edited, num_constrained, num_wanting, num_with_pictures, num_adapted: sequences with a slot that have edits,
    follow a grammar, want log probabilities of sampled tokens, have pictures, have an adapter.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        # zeros, not empty: the rows cost no memory before they are touched
        self.token_ids: NDArray[np.int32] = np.zeros((max_num_seqs, max_model_len), np.int32)
        max_blocks = -(-max_model_len // block_size)
        self.block_tables: NDArray[np.int32] = np.zeros((max_num_seqs, max_blocks), np.int32)

        def zeros() -> NDArray[np.int64]:
            return np.zeros(max_num_seqs, np.int64)

        self.num_tokens = zeros()
        self.num_computed = zeros()
        self.num_known = zeros()
        self.num_prompt = zeros()
        self.min_len = zeros()
        self.max_len = zeros()
        self.sample_place = zeros()
        self.end_token_ids: NDArray[np.int64] = np.full((max_num_seqs, 1), NO_TOKEN)
        self.is_watched: NDArray[np.bool_] = np.zeros(max_num_seqs, np.bool_)
        self.is_edited: NDArray[np.bool_] = np.zeros(max_num_seqs, np.bool_)
        self.is_constrained: NDArray[np.bool_] = np.zeros(max_num_seqs, np.bool_)
        self.is_free: NDArray[np.bool_] = np.zeros(max_num_seqs, np.bool_)
        self.generations: NDArray[np.int64] = np.full(max_num_seqs, -1)
        self.sampling = neutral_rows(max_num_seqs)
        self.sample_top: NDArray[np.int64] = np.full(max_num_seqs, NOT_WANTED)
        self.num_edited = self.num_constrained = self.num_wanting = self.num_with_pictures = 0
        self.num_adapted = 0
        self.adapter: NDArray[np.int64] = np.full(max_num_seqs, NO_ADAPTER)
        self.shift: NDArray[np.int64] = zeros()
        self.block_size = block_size
        self._free = list(range(max_num_seqs - 1, -1, -1))
        self._num_given = 0

    @property
    def num_free(self) -> int:
        """The number of slots no sequence holds."""
        return len(self._free)

    def assign(self, seq: Sequence) -> None:
        """Give `seq` a slot and write its whole state; it has its blocks, and no pending token."""
        assert not seq.num_pending_tokens, (
            f"{seq!r} has a token that no slot remembers the place of"
        )
        slot = seq.slot = self._free.pop()
        self._count_kinds(seq, 1)
        self.adapter[slot] = seq.adapter
        self.shift[slot] = 0 if seq.pictures is None else seq.pictures.shift
        self.block_tables[slot, : len(seq.block_table)] = seq.block_table
        self.num_prompt[slot] = seq.num_prompt_tokens
        self.min_len[slot] = seq.num_prompt_tokens + seq.params.min_tokens
        self.sampling[slot] = sampling_row(seq.params, seq.seed, seq.index)
        self.max_len[slot] = seq.max_len
        ends = list(seq.stop_token_ids)
        num_more = len(ends) - self.end_token_ids.shape[1]
        if num_more > 0:
            self.end_token_ids = np.pad(
                self.end_token_ids, ((0, 0), (0, num_more)), constant_values=NO_TOKEN
            )
        self.end_token_ids[slot] = NO_TOKEN
        self.end_token_ids[slot, : len(ends)] = ends
        self.is_watched[slot] = any(
            watcher is not None for watcher in (seq.stop_strings, seq.forcing, seq.matcher)
        )
        self.sample_top[slot] = seq.sample_top
        samples_forced = seq.forcing is not None and seq.samples_forced
        self.is_edited[slot] = seq.matcher is not None or seq.edits is not None or samples_forced
        self.is_free[slot] = seq.edits is None and seq.pictures is None
        self.num_edited += int(self.is_edited[slot])
        self.is_constrained[slot] = seq.matcher is not None
        self.rewrite(seq)

    def rewrite(self, seq: Sequence) -> None:
        """Write all tokens of `seq`, all known: it has just got this slot, or some of its tokens were replaced."""
        slot = seq.slot
        # Block keys hold key ids of pictures in place of placeholders, so they give no token ids then.
        keys = seq.block_keys if seq.pictures is None else []
        # Copying the keys' bytes takes a tenth of the time of copying a list of integers.
        packed = np.frombuffer(b"".join([key.tokens for key in keys]), np.int32)
        self.token_ids[slot, : len(packed)] = packed
        self.token_ids[slot, len(packed) : seq.num_tokens] = seq.token_ids[len(packed) :]
        self.num_tokens[slot] = self.num_known[slot] = seq.num_tokens
        self.num_computed[slot] = seq.num_computed_tokens
        self.generations[slot] = self._num_given
        self._num_given += 1

    def in_prefill(self, slots: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return [slots] bool: whether a sequence still has tokens of its prompt to compute, or more than one token.

        It has more than one after a preemption, and where forced tokens were added.
        """
        computed = self.num_computed[slots]
        has_prompt_left = computed < self.num_prompt[slots]
        has_several_left = computed < self.num_tokens[slots] - 1
        in_prefill: NDArray[np.bool_] = has_prompt_left | has_several_left
        return in_prefill

    def awaits_token(self, slots: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return [slots] bool: whether a sequence's grammar must wait for the token of a launched step."""
        awaits: NDArray[np.bool_] = self.is_constrained[slots] & (
            self.num_known[slots] < self.num_tokens[slots]
        )
        return awaits

    def release(self, seq: Sequence) -> None:
        """Take the slot of `seq` back."""
        self._free.append(seq.slot)
        self.num_edited -= int(self.is_edited[seq.slot])
        self.is_edited[seq.slot] = False
        self._count_kinds(seq, -1)
        self.generations[seq.slot] = -1
        seq.slot = -1

    def _count_kinds(self, seq: Sequence, change: int) -> None:
        """Add `change`, 1 or -1, to the count of each kind that a sequence is of."""
        if seq.matcher is not None:
            self.num_constrained += change
        if seq.sample_top != NOT_WANTED:
            self.num_wanting += change
        if seq.pictures is not None:
            self.num_with_pictures += change
        if seq.adapter != NO_ADAPTER:
            self.num_adapted += change

    def advance(
        self,
        slots: NDArray[np.int64],
        num_new_tokens: NDArray[np.int64],
        samples: NDArray[np.bool_],
    ) -> None:
        """Count the tokens that a launched step computes for these slots, and a pending token for each that samples."""
        self.num_computed[slots] += num_new_tokens
        sampling = slots[samples]
        self.num_tokens[sampling] += 1
        self.sample_place[sampling] = np.arange(len(sampling))

    def add_known(self, slots: NDArray[np.int64], token_ids: NDArray[np.int64]) -> None:
        """Write the first pending token of each slot: it is known now."""
        self.token_ids[slots, self.num_known[slots]] = token_ids
        self.num_known[slots] += 1

    def move_on(self, seq: Sequence, num_new: int) -> None:
        """Write the last num_new tokens of a sequence that has no pending token, and its counts."""
        slot = seq.slot
        known = seq.num_tokens
        self.token_ids[slot, known - num_new : known] = seq.token_ids[known - num_new :]
        self.num_tokens[slot] = self.num_known[slot] = known
        self.num_computed[slot] = seq.num_computed_tokens

    def may_draft(self, slots: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return [slots] bool: whether a sequence's tokens may be guessed."""
        wants_logprobs = self.sample_top[slots] != NOT_WANTED
        may_end = self.num_tokens[slots] >= self.min_len[slots]  # no ban of end tokens any more
        may_draft: NDArray[np.bool_] = self.is_free[slots] & ~wants_logprobs & may_end
        return may_draft

    def may_end(self, slots: NDArray[np.int64], token_ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return [slots] bool: whether a sequence may end with this token, so that it must be looked at by itself.

        token_ids: [slots] int64, the first pending token of each sequence.
        """
        is_end_token = (self.end_token_ids[slots] == token_ids[:, None]).any(axis=1)
        is_last = self.num_known[slots] + 1 >= self.max_len[slots]
        is_failed = token_ids < 0  # no token could be chosen
        may_end: NDArray[np.bool_] = is_end_token | is_last | self.is_watched[slots] | is_failed
        return may_end
