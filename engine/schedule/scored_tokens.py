"""ScoredTokens: the tokens whose log probability a step gives. The row of a token scores the one behind it."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.schedule.logprobs import NOT_WANTED, RowLogprobs
from engine.schedule.scheduled_batch import ScheduledBatch
from engine.schedule.sequence import Sequence, SequenceStatus
from engine.schedule.slots import SlotTable


@dataclass(frozen=True)
class ScoredTokens:
    """Tokens whose log probability a step gives, sequence after sequence.

    of: the sequences, and how many of each.  rows, token_ids, tops: [scored] int64, the row of each token's
    distribution, the token, and the number of likely tokens wanted besides.
    """

    of: list[tuple[Sequence, int]]
    rows: NDArray[np.int64]
    token_ids: NDArray[np.int64]
    tops: NDArray[np.int64]


NONE_SCORED = ScoredTokens([], *(np.zeros(0, np.int64) for _ in range(3)))


def find_scored(batch: ScheduledBatch, slots: SlotTable) -> ScoredTokens:
    """Find the tokens that a step to launch scores; NONE_SCORED if there are none."""
    if not slots.num_wanting:
        return NONE_SCORED
    parts = [part for part in (_of_prompts(batch, slots), *_of_targets(batch)) if part.of]
    if len(parts) <= 1:
        return parts[0] if parts else NONE_SCORED
    return ScoredTokens(
        [each for part in parts for each in part.of],
        np.concatenate([part.rows for part in parts]),
        np.concatenate([part.token_ids for part in parts]),
        np.concatenate([part.tops for part in parts]),
    )


def _of_prompts(batch: ScheduledBatch, slots: SlotTable) -> ScoredTokens:
    """Collect the prompts' tokens whose log probabilities are wanted."""
    held, num_new, num_computed = batch.slots, batch.num_new_tokens, slots.num_computed[batch.slots]
    firsts = np.maximum(num_computed + 1, slots.next_scored[held])
    ends = np.minimum(num_computed + num_new + 1, slots.score_end[held])
    counts = np.maximum(ends - firsts, 0)
    if not counts.any():
        return NONE_SCORED
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    first_rows = np.cumsum(num_new) - num_new + firsts - 1 - num_computed
    token_ids = slots.token_ids[np.repeat(held, counts), np.repeat(firsts, counts) + within]
    return ScoredTokens(
        of=[(batch.seqs[i], int(counts[i])) for i in np.flatnonzero(counts).tolist()],
        rows=np.repeat(first_rows, counts) + within,
        token_ids=token_ids.astype(np.int64),
        tops=np.repeat(slots.score_top[held], counts),
    )


def _of_targets(batch: ScheduledBatch) -> Iterator[ScoredTokens]:
    """Collect the targets of sequences that only score."""
    first_row = len(batch.decodes)
    for seq, num_new, _ in batch.each_prefill():
        if seq.targets is not None:
            num_computed = seq.num_computed_tokens
            found = seq.targets.until(num_computed + num_new)
            places = seq.targets.places[found]
            yield ScoredTokens(
                of=[(seq, len(places))] if len(places) else [],
                rows=first_row + places - 1 - num_computed,
                token_ids=seq.targets.token_ids[found],
                tops=np.zeros_like(places),
            )
        first_row += num_new


def sample_tops(batch: ScheduledBatch, slots: SlotTable) -> NDArray[np.int64]:
    """Return [samples] int64, as StepBatch has it."""
    if not slots.num_wanting:
        return NONE_SCORED.tops
    tops = slots.sample_top[batch.sampling_slots]
    return tops if (tops != NOT_WANTED).any() else NONE_SCORED.tops


def count_scored(batch: ScheduledBatch, slots: SlotTable) -> None:
    """Count the tokens that a launched step scores, before its computed ones are counted."""
    for seq, count in find_scored(batch, slots).of:
        if seq.targets is not None:
            seq.targets.next += count
        else:
            seq.next_scored += count
            slots.next_scored[seq.slot] = seq.next_scored
        batch.scored.append((seq, count))


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
