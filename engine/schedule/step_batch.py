"""StepBatch: a step's tokens as numpy arrays, cut out of the slot table; a rank turns it into a ForwardBatch."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from engine.sampling.logit_edits import EditParts, LogitEdits
from engine.sampling.sampling_batch import SamplingBatch
from engine.schedule.logprobs import NOT_WANTED, RowLogprobs
from engine.schedule.pictures import Part, StepPictures
from engine.schedule.scheduled_batch import ScheduledBatch
from engine.schedule.sequence import NO_ADAPTER, SequenceStatus
from engine.schedule.slots import NO_TOKEN, SlotTable
from engine.structured.matcher import Matcher, fill_step_masks

NOTHING: NDArray[np.int64] = np.zeros(0, np.int64)


def _find_wanted(batch: ScheduledBatch) -> dict[str, NDArray[np.int64]]:
    """Set batch.scored and batch.pooled, and return the arrays of StepBatch that say which rows these need.

    The row of a token scores the token behind it.
    """
    batch.scored = []
    batch.pooled = []
    scored = [(NOTHING, NOTHING, NOTHING)]
    pooled_rows = [NOTHING]
    first_row = len(batch.decodes)
    for seq, num_new, _ in batch.each_prefill():
        end = seq.num_computed_tokens + num_new
        # What to add to a token's index in the sequence to get its row.
        shift = first_row - seq.num_computed_tokens
        first_row += num_new
        if seq.targets is not None:
            reached = seq.targets.until(end)
            places = seq.targets.places[reached]
            if len(places):
                batch.scored.append((seq, len(places)))
                tops = np.full_like(places, seq.targets.num_top)
                scored.append((places - 1 + shift, seq.targets.token_ids[reached], tops))
        elif seq.pooled is not None:
            pooled = seq.pooled.until(end)
            if pooled:
                batch.pooled.append((seq, len(pooled)))
                pooled_rows.append(np.arange(pooled.start, pooled.stop) + shift)
    if not batch.scored and not batch.pooled:
        return {}
    rows, token_ids, tops = map(np.concatenate, zip(*scored, strict=True))
    return {
        "scored_rows": rows,
        "scored_token_ids": token_ids,
        "scored_tops": tops,
        "pooled_rows": np.concatenate(pooled_rows),
        "pooled_counts": np.array([count for _, count in batch.pooled], np.int64),
    }


def _sample_tops(batch: ScheduledBatch, slots: SlotTable) -> NDArray[np.int64]:
    if not slots.num_wanting:
        return NOTHING
    tops = np.full(len(batch.sampling) + batch.num_guessed, NOT_WANTED)
    tops[: len(batch.sampling)] = slots.sample_top[batch.sampling_slots]
    return tops if (tops != NOT_WANTED).any() else NOTHING


def give_logprobs(logprobs: RowLogprobs, batch: ScheduledBatch) -> None:
    """Hand each live sequence its tokens' log probabilities, before it learns the tokens.

    logprobs: of the samples that wanted them, in their order, then of the scored tokens.
    """
    row = 0
    for seq in batch.sampling:
        if seq.sample_top != NOT_WANTED:
            if seq.status is not SequenceStatus.FINISHED and not seq.num_stale:
                seq.logprobs.append(logprobs.rows(row, row + 1))
            row += 1
    for seq, count in batch.scored:
        if seq.status is not SequenceStatus.FINISHED:
            seq.scored.append(logprobs.rows(row, row + count))
        row += count


def give_pooled(pooled: NDArray[np.float32], batch: ScheduledBatch) -> None:
    """Hand each sequence that is not finished its row of a step's pooled states."""
    for vector, (seq, count) in zip(pooled, batch.pooled, strict=True):
        if seq.status is not SequenceStatus.FINISHED and seq.pooled is not None:
            seq.pooled.add(vector, count)


#: Added to one logit, this leaves all other tokens without weight at any temperature.
CERTAIN: NDArray[np.float32] = np.array([1e9], np.float32)


def build_logit_edits(
    batch: ScheduledBatch, slots: SlotTable
) -> tuple[LogitEdits | None, Callable[[], None] | None]:
    """Collect the edits of the sequences that sample, and a call that computes the masks of grammars later.

    A row is an index into the step's samples; a place is an index into the edited rows.
    """
    sampling = batch.sampling_slots
    early = np.flatnonzero(slots.num_tokens[sampling] < slots.min_len[sampling])
    edited = np.flatnonzero(slots.is_edited[sampling]) if slots.num_edited else NOTHING
    if not len(early) and not len(edited) and not (slots.num_constrained and batch.drafted):
        return None, None
    rows = np.union1d(early, edited) if len(early) else edited
    parts = EditParts()
    matchers: list[Matcher] = []
    for place, row in zip(np.searchsorted(rows, edited).tolist(), edited.tolist(), strict=True):
        seq = batch.sampling[row]
        forced_id = seq.forced_sample if seq.forced else None
        if forced_id is not None:
            parts.biased.append((place, np.array([forced_id], np.int64)))
            parts.biases.append(CERTAIN)
        elif seq.edits is not None:
            pending_sample = int(slots.sample_place[seq.slot]) if seq.num_pending_tokens else None
            seq.edits.write(parts, place, seq.token_ids, seq.num_prompt_tokens, pending_sample)
        if seq.matcher is not None and forced_id is None:
            assert not seq.num_pending_tokens, (
                f"{seq!r}: a grammar goes on from tokens that are known"
            )
            parts.later.append(place)
            matchers.append(seq.matcher)
    end_token_ids = slots.end_token_ids[sampling[early]]
    for place, row, banned_ids in zip(
        np.searchsorted(rows, early).tolist(), early.tolist(), end_token_ids, strict=True
    ):
        if batch.sampling[row].forced_sample is None:
            parts.banned.append((place, banned_ids[banned_ids != NO_TOKEN]))
    first_row = len(sampling)
    for draft in batch.drafted if slots.num_constrained else ():
        matcher = draft.seq.matcher
        if matcher is not None:
            # one matcher for the row of the last token, and one for each guess's row
            row_matchers = matcher.along(draft.guesses)
            num_rows = len(row_matchers)
            parts.later += range(len(rows), len(rows) + num_rows)
            rows = np.concatenate((rows, np.arange(first_row, first_row + num_rows)))
            matchers += row_matchers
        first_row += 1 + len(draft.guesses)
    if not matchers:
        return parts.joined(rows), None
    edits = parts.joined(rows, matchers[0].vocabulary.num_words)
    return edits, partial(fill_step_masks, matchers, edits.token_masks[len(parts.masks) :])


@dataclass(frozen=True)
class StepBatch:
    """The tokens of one step, sequence after sequence. All arrays are int64, except that block_tables is int32.

    A row is an index into the step's tokens.
    token_ids, positions: [tokens], a token and its place in its sequence.
    slot_mapping: [tokens], block_id * block_size + offset, where its keys and values go.
    sample_rows: [samples], the rows whose logits are wanted.
    block_tables: [seqs, max_blocks] int32.
    context_lens, query_lens: [seqs], how many tokens each sequence has after this step, and how many the step computes.
    pending_rows, pending_samples: [pending], the rows whose token was not known when the step was built, and the index
    of that token among the samples of the step launched before. In those rows token_ids means nothing.
    slots, generations: [seqs], of SlotTable; empty in steps that no scheduler made.
    sample_tops: [samples], how many likely tokens are wanted beside the log probability of the sampled one. NOT_WANTED
    where no log probability is wanted; empty if that holds for all samples.
    scored_rows, scored_token_ids, scored_tops: [scored], a row whose logits score a token, that token, and how many
    likely tokens are wanted with it.
    pooled_rows: [pooled], rows whose hidden states are pooled, those of a sequence one after another.
    pooled_counts: [pooled seqs], how many of each.
    copy_from, copy_to: [copied], slots from and to which keys and values are copied first; no slot is in both.
    state_parts: [parts, 5], for models with states, one part behind another: the part's first row and its end, then the
    rows of the pool of states that it reads, that it writes, and that it writes as a snapshot; -1 for none.
    kept_states: [rows], rows of the pool of states that are put back if the step raises.
    adapters: [seqs], the loaded adapter of each, NO_ADAPTER for none; empty if no sequence has one.
    pictures: None for a step without.
    """

    token_ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    slot_mapping: NDArray[np.int64]
    sample_rows: NDArray[np.int64]
    block_tables: NDArray[np.int32]
    context_lens: NDArray[np.int64]
    query_lens: NDArray[np.int64]
    pending_rows: NDArray[np.int64] = field(default_factory=lambda: NOTHING)
    pending_samples: NDArray[np.int64] = field(default_factory=lambda: NOTHING)
    slots: NDArray[np.int64] = field(default_factory=lambda: NOTHING)
    generations: NDArray[np.int64] = field(default_factory=lambda: NOTHING)
    sample_tops: NDArray[np.int64] = field(default_factory=lambda: NOTHING)
    scored_rows: NDArray[np.int64] = field(default_factory=lambda: NOTHING)
    scored_token_ids: NDArray[np.int64] = field(default_factory=lambda: NOTHING)
    scored_tops: NDArray[np.int64] = field(default_factory=lambda: NOTHING)
    pooled_rows: NDArray[np.int64] = field(default_factory=lambda: NOTHING)
    pooled_counts: NDArray[np.int64] = field(default_factory=lambda: NOTHING)
    copy_from: NDArray[np.int64] = field(default_factory=lambda: NOTHING)
    copy_to: NDArray[np.int64] = field(default_factory=lambda: NOTHING)
    state_parts: NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, 5), np.int64))
    kept_states: NDArray[np.int64] = field(default_factory=lambda: NOTHING)
    adapters: NDArray[np.int64] = field(default_factory=lambda: NOTHING)
    pictures: StepPictures | None = None

    def repeatable(self) -> "StepBatch":
        """Return the same step, but one that puts back the states it has changed if it raises."""
        written = np.unique(self.state_parts[:, 3:])
        return replace(self, kept_states=written[written >= 0])

    @property
    def wants_logprobs(self) -> bool:
        """Whether any log probabilities are wanted."""
        return len(self.sample_tops) > 0 or len(self.scored_rows) > 0

    @property
    def gives_tokens_alone(self) -> bool:
        """Whether the step yields tokens only, and neither log probabilities nor pooled states."""
        return not self.wants_logprobs and not len(self.pooled_rows)


def build_step_batch(batch: ScheduledBatch, slots: SlotTable) -> StepBatch:
    """Cut the scheduled tokens out of the slot table."""
    rows = batch.slots
    num_new = batch.num_new_tokens
    context_lens = slots.num_computed[rows] + num_new
    ends = np.cumsum(num_new)
    token_rows = rows  # the slot of each token; one token a sequence
    positions = context_lens - 1
    if batch.prefills or batch.drafted:
        token_rows = np.repeat(rows, num_new)
        positions = np.arange(ends[-1]) + np.repeat(context_lens - ends, num_new)
    blocks = slots.block_tables[token_rows, positions // slots.block_size]
    max_blocks = -(-int(context_lens.max()) // slots.block_size)
    copy_from, copy_to = _copied_slots(batch, slots.block_size)
    state_parts = np.zeros((0, 5), np.int64)
    if batch.states is not None:
        state_parts = batch.states.parts(batch.decode_slots, batch.each_prefill())
    # The guesses of drafted sequences, which come last, are in the slot table: none of their tokens is pending.
    is_drafted = np.arange(len(rows)) >= len(rows) - len(batch.drafted)
    is_pending = (context_lens > slots.num_known[rows]) & ~is_drafted
    drafted_rows = np.arange(ends[-1] - batch.num_guessed, ends[-1])
    return StepBatch(
        token_ids=slots.token_ids[token_rows, positions].astype(np.int64),
        positions=positions,
        slot_mapping=blocks.astype(np.int64) * slots.block_size + positions % slots.block_size,
        sample_rows=np.concatenate((ends[batch.samples] - 1, drafted_rows)),
        block_tables=slots.block_tables[:, :max_blocks].take(rows, axis=0),
        context_lens=context_lens,
        query_lens=num_new,
        pending_rows=ends[is_pending] - 1,
        pending_samples=slots.sample_place[rows[is_pending]],
        slots=rows,
        generations=slots.generations[rows],
        sample_tops=_sample_tops(batch, slots),
        copy_from=copy_from,
        copy_to=copy_to,
        adapters=_adapters_of(rows, slots) if slots.num_adapted else NOTHING,
        state_parts=state_parts,
        pictures=_find_pictures(batch, slots, positions) if slots.num_with_pictures else None,
        **_find_wanted(batch),
    )


def _adapters_of(rows: NDArray[np.int64], slots: SlotTable) -> NDArray[np.int64]:
    adapters = slots.adapter[rows]
    return adapters if (adapters != NO_ADAPTER).any() else NOTHING


def _find_pictures(
    batch: ScheduledBatch, slots: SlotTable, places: NDArray[np.int64]
) -> StepPictures | None:
    """Find the pictures of a step's tokens, and the positions of all tokens if any differs from its index.

    places: [tokens] int64, each token's index in its sequence.
    """
    rows = [NOTHING]
    parts = list[Part]()
    blocks = [np.zeros((0, 2), np.int64)]
    shifts = np.repeat(slots.shift[batch.slots], batch.num_new_tokens)
    positions = np.tile(places + shifts, (3, 1)) if shifts.any() else None
    next_row = 0
    for seq, num_new in zip(batch.seqs, batch.num_new_tokens.tolist(), strict=True):
        start = seq.num_computed_tokens
        first_row = next_row
        next_row += num_new
        if seq.pictures is None or start >= seq.num_prompt_tokens:
            continue
        own_rows, own_parts, own_blocks = seq.pictures.within(start, start + num_new)
        shift = first_row - start  # what to add to a token's index in the sequence to get its row
        rows.append(own_rows + shift)
        blocks.append(own_blocks + shift)
        parts += own_parts
        if seq.pictures.positions is not None:
            if positions is None:
                positions = np.tile(places + shifts, (3, 1))
            own_positions = seq.pictures.positions[:, start : start + num_new]
            positions[:, first_row : first_row + own_positions.shape[1]] = own_positions
    if not parts and positions is None:
        return None
    return StepPictures(np.concatenate(rows), parts, positions, np.concatenate(blocks))


def _copied_slots(
    batch: ScheduledBatch, block_size: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the slots of the KV pool from which and to which the step copies, [copied] int64 each."""
    if not batch.copies:
        return NOTHING, NOTHING
    copies = np.array(
        [(copy.source, copy.target, copy.num_tokens) for copy in batch.copies], np.int64
    )
    source_blocks, target_blocks, counts = copies.T
    first_indexes = np.repeat(np.cumsum(counts) - counts, counts)
    offsets = np.arange(counts.sum()) - first_indexes  # of each token in its block
    sources = np.repeat(source_blocks, counts) * block_size + offsets
    targets = np.repeat(target_blocks, counts) * block_size + offsets
    return sources, targets


def build_sampling_batch(batch: ScheduledBatch, slots: SlotTable) -> SamplingBatch:
    """Cut the sampling values of the sequences that sample in this step out of the slot table."""
    rows = batch.sampling_slots
    position = slots.num_tokens[rows]
    if batch.drafted:
        # A sequence with guesses samples behind its last token and behind each guess.
        counts = batch.num_new_tokens[-len(batch.drafted) :]
        draft_slots = np.repeat(batch.slots[-len(batch.drafted) :], counts)
        rows = np.concatenate((rows, draft_slots))
        first_rows = np.repeat(np.cumsum(counts) - counts, counts)
        num_guesses_before = np.arange(len(draft_slots)) - first_rows
        draft_position = slots.num_tokens[draft_slots] + num_guesses_before
        position = np.concatenate((position, draft_position))
    edits, masks = build_logit_edits(batch, slots)
    values = slots.sampling.take(rows)  # ten times as fast as indexing a structured array
    return SamplingBatch(values, position.astype(np.uint64), edits, masks)
