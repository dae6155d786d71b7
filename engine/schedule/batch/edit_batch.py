"""The edits of a step's logits, out of the sequences that have any."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine.sampling.logit_edits import EditParts, LogitEdits
from engine.schedule.batch.forced import sampled_as
from engine.schedule.batch.scheduled_batch import ScheduledBatch
from engine.schedule.batch.slots import NO_TOKEN, SlotTable
from engine.structured.masks import StepMasks
from engine.structured.matcher import Matcher

#: Added to a logit, leaves no other token any weight at any temperature.
CERTAIN: NDArray[np.float32] = np.array([1e9], np.float32)
NOBODY: NDArray[np.int64] = np.zeros(0, np.int64)


def build_logit_edits(batch: ScheduledBatch, slots: SlotTable) -> tuple[LogitEdits | None, StepMasks | None]:
    """Collect the edits of the sequences that sample in this step; None if there are none.

    The second: the masks of grammars among them, which are still to be computed; None where there are none.
    """
    sampling = batch.sampling_slots
    early = np.flatnonzero(slots.num_tokens[sampling] < slots.min_len[sampling])
    edited = np.flatnonzero(slots.is_edited[sampling]) if slots.num_edited else NOBODY
    if not len(early) and not len(edited):
        return None, None
    rows = np.union1d(early, edited) if len(early) else edited
    parts = EditParts()
    matchers: list[Matcher] = []
    for place, row in zip(np.searchsorted(rows, edited).tolist(), edited.tolist(), strict=True):
        seq = batch.sampling[row]
        only = sampled_as(seq) if seq.forced else None
        if only is not None:
            parts.biased.append((place, np.array([only], np.int64)))
            parts.biases.append(CERTAIN)
        elif seq.edits is not None:
            pending_sample = int(slots.sample_place[seq.slot]) if seq.num_pending_tokens else None
            seq.edits.write(parts, place, seq.token_ids, seq.num_prompt_tokens, pending_sample)
        if seq.matcher is not None and only is None:
            assert not seq.num_pending_tokens, f"{seq!r}: a grammar goes on from tokens that are known"
            parts.later.append(place)
            matchers.append(seq.matcher)
    end_token_ids = slots.end_token_ids[sampling[early]]
    for place, row, own in zip(
        np.searchsorted(rows, early).tolist(), early.tolist(), end_token_ids, strict=True
    ):
        if sampled_as(batch.sampling[row]) is None:
            parts.banned.append((place, own[own != NO_TOKEN]))
    if not matchers:
        return parts.joined(rows), None
    edits = parts.joined(rows, matchers[0].vocabulary.num_words)
    return edits, StepMasks(matchers, edits.token_masks[len(parts.masks) :])
