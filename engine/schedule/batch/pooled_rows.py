"""PooledRows: the rows of a step whose hidden states are pooled, each sequence's own."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.schedule.batch.scheduled_batch import ScheduledBatch
from engine.schedule.batch.slots import SlotTable
from engine.schedule.sequences.sequence import Sequence, SequenceStatus


@dataclass(frozen=True)
class PooledRows:
    """of: the sequences, and how many rows of each.  rows: [pooled] int64, in the order of `of`."""

    of: list[tuple[Sequence, int]]
    rows: NDArray[np.int64]

    @property
    def counts(self) -> NDArray[np.int64]:
        """[seqs] int64, how many rows of each."""
        return np.array([count for _, count in self.of], np.int64) if self.of else self.rows


NONE_POOLED = PooledRows([], np.zeros(0, np.int64))


def find_pooled(batch: ScheduledBatch, slots: SlotTable) -> PooledRows:
    """The rows that a step pools which is not launched yet; NONE_POOLED if there are none."""
    if not slots.num_pooled:
        return NONE_POOLED
    of, rows = [], []
    first_row = len(batch.decodes)
    for seq, num_new, _ in batch.each_prefill():
        if seq.pooled is not None:
            own = seq.pooled.until(seq.num_computed_tokens + num_new)
            if own:
                of.append((seq, len(own)))
                rows.append(np.arange(own.start, own.stop) + first_row - seq.num_computed_tokens)
        first_row += num_new
    return PooledRows(of, np.concatenate(rows)) if of else NONE_POOLED


def count_pooled(batch: ScheduledBatch, slots: SlotTable) -> None:
    """The step is launched, and its computed tokens are not counted yet: count those that it pools."""
    batch.pooled = find_pooled(batch, slots).of
    for seq, count in batch.pooled:
        assert seq.pooled is not None
        seq.pooled.next += count


def give_pooled(pooled: NDArray[np.float32], batch: ScheduledBatch) -> None:
    """Hand each sequence that is still there its row of what a step has pooled."""
    for vector, (seq, count) in zip(pooled, batch.pooled, strict=True):
        if seq.status is not SequenceStatus.FINISHED and seq.pooled is not None:
            seq.pooled.add(vector, count)
