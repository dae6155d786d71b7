"""Forced tokens: what a sequence must take next, whatever is sampled for it.

Which they are is known when the token before them is: at the end of a reasoning span that is as long as it
may be, or where a grammar leaves one way. They are appended at once, like tokens of a prompt, and computed
together in the next step: no forward pass is spent on one of them alone. A step that was launched meanwhile
has sampled where one of them stands now; that sample is dropped, and what it computed for tokens before it
is right.
"""

from __future__ import annotations

from engine.schedule.batch.slots import SlotTable
from engine.schedule.sequences.logprobs import NOT_WANTED
from engine.schedule.sequences.sequence import Sequence


def learn(seq: Sequence, token_id: int, slots: SlotTable) -> bool:
    """Hand its first pending token to a sequence that has a Forcing; whether it ends with that.

    All that is forced then is appended. If it goes on with others than launched steps have sampled, what they
    computed behind the last right one does not count, and its slot is as given anew.
    """
    num_known, num_forced = len(seq.token_ids), len(seq.forced)
    is_other = num_forced > 0 and seq.forced[0] != token_id
    ends = seq.ends_with(token_id)
    if not num_forced and not seq.forced:
        return ends  # most tokens
    while seq.forced and not ends and not _is_sampled(seq):
        ends = seq.ends_with(seq.forced[0])
    if ends:
        return True
    num_ahead, num_masked = seq.num_tokens - num_known - 1, max(num_forced - 1, 0)
    if is_other or len(seq.token_ids) > num_known + 1 or len(seq.forced) > num_masked < num_ahead:
        seq.num_stale += num_ahead
        seq.num_tokens = len(seq.token_ids)
        num_right = num_known if is_other else num_known + 1
        seq.num_computed_tokens = min(seq.num_computed_tokens, num_right, seq.num_tokens - 1)
        if seq.slot >= 0:
            slots.rewrite(seq)
    return False


def sampled_as(seq: Sequence) -> int | None:
    """Return the only token that a sequence may sample next, or None if it is free."""
    place = seq.num_pending_tokens
    return seq.forced[place] if place < len(seq.forced) and _is_sampled(seq) else None


def _is_sampled(seq: Sequence) -> bool:
    """Whether forced tokens are sampled too, from themselves alone: their log probabilities are wanted."""
    return seq.sample_top != NOT_WANTED
