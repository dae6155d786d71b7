"""BatchRows: which row of the decode batch on the device each sequence has, and what the device lacks.

The device keeps the rows from step to step and advances them by itself (`attention.decode_state`). Here the
host remembers what it has put there. It is told of no joins and leaves: it compares, so that whatever came in
between (steps of other kinds, preemption, a failure), a row that is not known to be right is written anew.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.schedule.batch.step_batch import StepBatch


@dataclass(frozen=True)
class RowChanges:
    """What to write before a step.

    seqs: [written] int64, which sequences of the step are written, each to its row of `rows`.
    padding: [left] int64, rows that belong to no sequence from now on.
    table_rows, table_columns: [new] int64 and block_ids: [new] int32, entries of the block tables.
    order: [max_num_seqs] int32, all rows, the longest contexts first and padding last; None where it is as it
    was, since rows that advance together keep their order.
    """

    seqs: NDArray[np.int64]
    rows: NDArray[np.int64]
    padding: NDArray[np.int64]
    table_rows: NDArray[np.int64]
    table_columns: NDArray[np.int64]
    block_ids: NDArray[np.int32]
    order: NDArray[np.int32] | None


class BatchRows:
    """What the device's rows hold, as far as the host knows: those of the last step first, then padding."""

    def __init__(self, max_num_seqs: int, block_size: int) -> None:
        self._block_size = block_size
        self._row_of_slot: NDArray[np.int64] = np.zeros(max_num_seqs, np.int64)
        self._generations: NDArray[np.int64] = np.zeros(max_num_seqs, np.int64)
        self._positions: NDArray[np.int64] = np.zeros(max_num_seqs, np.int64)  # that each computes next
        self._num_blocks: NDArray[np.int64] = np.zeros(max_num_seqs, np.int64)
        self.forget()

    def forget(self) -> None:
        """Know nothing of the rows: the next step writes them all."""
        self._generations.fill(-1)
        self._num_filled = len(self._generations)

    def update(self, step: StepBatch) -> tuple[NDArray[np.int64], RowChanges]:
        """The row of each of the step's sequences, [seqs] int64, and what to write; it counts as computed.

        They are the first rows, in any order: a sequence stays where it is while it can.
        """
        num_seqs = len(step.slots)
        rows = self._place(step)
        is_new = self._generations[rows] != step.generations
        written = np.flatnonzero(is_new | (self._positions[rows] != step.positions))
        padding = np.arange(num_seqs, max(num_seqs, self._num_filled))
        table_seqs, table_columns = self._new_blocks(step, np.where(is_new, 0, self._num_blocks[rows]))
        changes = RowChanges(
            seqs=written,
            rows=rows[written],
            padding=padding,
            table_rows=rows[table_seqs],
            table_columns=table_columns,
            block_ids=step.block_tables[table_seqs, table_columns],
            order=self._order(rows, step.context_lens) if len(written) or len(padding) else None,
        )
        self._generations[rows] = step.generations
        self._positions[rows] = step.positions + 1
        self._num_blocks[rows] = self._blocks_of(step)
        self._generations[num_seqs:] = -1
        self._num_filled = num_seqs
        return rows, changes

    def _place(self, step: StepBatch) -> NDArray[np.int64]:
        """A row below the number of sequences for each: its own, or one that nobody has."""
        rows: NDArray[np.int64] = self._row_of_slot[step.slots]
        stays = (self._generations[rows] == step.generations) & (rows < len(rows))
        if not stays.all():
            is_free = np.ones(len(rows), np.bool_)
            is_free[rows[stays]] = False
            rows[~stays] = np.flatnonzero(is_free)
            self._row_of_slot[step.slots] = rows
        return rows

    def _order(self, rows: NDArray[np.int64], context_lens: NDArray[np.int64]) -> NDArray[np.int32]:
        order = np.arange(len(self._generations), dtype=np.int32)
        order[: len(rows)] = rows[np.argsort(-context_lens, kind="stable")]
        return order

    def _new_blocks(
        self, step: StepBatch, num_known: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Sequence and column of each block that the device does not know. num_known: [seqs] int64."""
        num_new = np.maximum(self._blocks_of(step) - num_known, 0)
        seqs = np.repeat(np.arange(len(num_new)), num_new)
        firsts = np.cumsum(num_new) - num_new
        return seqs, np.arange(len(seqs)) + np.repeat(num_known - firsts, num_new)

    def _blocks_of(self, step: StepBatch) -> NDArray[np.int64]:
        return -(-step.context_lens // self._block_size)
