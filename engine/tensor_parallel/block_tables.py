"""Block tables on their way to the ranks: a step sends only the blocks that the ranks do not have yet."""

import numpy as np
from numpy.typing import NDArray

from engine.schedule.step_batch import StepBatch


class SentTables:
    """Remembers, on the driver's side, how much of each slot's block table the ranks have.

    While a slot keeps its generation, its block table changes only at its end, where blocks are added (`SlotTable`).
    """

    def __init__(self, num_slots: int, block_size: int) -> None:
        self._block_size = block_size
        self._generations: NDArray[np.int64] = np.full(num_slots, -1)
        self._num_sent: NDArray[np.int64] = np.zeros(num_slots, np.int64)

    def changes(self, step: StepBatch) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Return [seqs] int64, how many blocks of each sequence the ranks have, and [new] int32, the blocks to send.

        A step that no scheduler made has no slots. Then the first array is empty, and the second is the whole table.
        """
        if not len(step.slots):
            return step.slots, step.block_tables
        is_same = self._generations[step.slots] == step.generations
        num_needed = -(-step.context_lens // self._block_size)
        num_known = np.where(is_same, self._num_sent[step.slots], 0)
        self._generations[step.slots] = step.generations
        self._num_sent[step.slots] = np.maximum(num_known, num_needed)

        columns = np.arange(step.block_tables.shape[1])
        is_new = (columns >= num_known[:, None]) & (columns < num_needed[:, None])
        return num_known, step.block_tables[is_new]


class KeptTables:
    """Holds, on a rank's side, the block table of each slot, as the driver has sent it."""

    def __init__(self, num_slots: int, max_model_len: int, block_size: int) -> None:
        self._block_size = block_size
        max_blocks = -(-max_model_len // block_size)
        # Zeros cost no memory before they are touched.
        self._tables: NDArray[np.int32] = np.zeros((num_slots, max_blocks), np.int32)

    def update(
        self,
        slots: NDArray[np.int64],
        context_lens: NDArray[np.int64],
        num_known: NDArray[np.int64],
        new_blocks: NDArray[np.int32],
    ) -> NDArray[np.int32]:
        """Keep the new blocks; return the step's block tables, [seqs, blocks of the longest] int32.

        num_known, new_blocks: as `SentTables.changes` returns them.
        """
        if not len(slots):
            return new_blocks
        num_needed = -(-context_lens // self._block_size)
        num_columns = int(num_needed.max())
        tables = self._tables[:, :num_columns].take(slots, axis=0)
        columns = np.arange(num_columns)
        tables[(columns >= num_known[:, None]) & (columns < num_needed[:, None])] = new_blocks
        self._tables[slots, :num_columns] = tables
        return tables
