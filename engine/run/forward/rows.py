"""The rows of a decode batch on the device: which sequence has which, and the memory that graphs read."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.attention.decode_state import PADDING, DecodeState, RowMemory, RowWrites
from engine.kernels.upload import ALIGNMENT
from engine.run.forward.runner import Sampled
from engine.sampling.sampling_batch import ROW, SamplingBatch
from engine.sampling.sampling_rows import SamplingRows
from engine.schedule.step_batch import StepBatch


@dataclass(frozen=True)
class RowChanges:
    """The host's changes to the rows before a step.

    seqs: [written] int64, sequences of the step that are written, each to its row of `rows`.
    padding: [left] int64, rows that belong to no sequence from now on.
    table_rows, table_columns: [new] int64 and block_ids: [new] int32, entries of the block tables.
    order: [max_num_seqs] int32, all rows, the longest contexts first, padding last; None if unchanged.
    """

    seqs: NDArray[np.int64]
    rows: NDArray[np.int64]
    padding: NDArray[np.int64]
    table_rows: NDArray[np.int64]
    table_columns: NDArray[np.int64]
    block_ids: NDArray[np.int32]
    order: NDArray[np.int32] | None


class BatchRows:
    """The host's knowledge of the device's rows: those of the last step first, then padding."""

    def __init__(self, max_num_seqs: int, block_size: int) -> None:
        self._block_size = block_size
        self._row_of_slot: NDArray[np.int64] = np.zeros(max_num_seqs, np.int64)
        self._generations: NDArray[np.int64] = np.zeros(max_num_seqs, np.int64)
        self._positions: NDArray[np.int64] = np.zeros(max_num_seqs, np.int64)  # that each computes next
        self._num_blocks: NDArray[np.int64] = np.zeros(max_num_seqs, np.int64)
        self.forget()

    def forget(self) -> None:
        """Forget the rows: the next step writes them all."""
        self._generations.fill(-1)
        self._num_filled = len(self._generations)

    def update(self, step: StepBatch) -> tuple[NDArray[np.int64], RowChanges]:
        """Return the row of each sequence, [seqs] int64, and the changes; the step counts as computed.

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
        """Give each sequence a row below the number of sequences: its own, or a free one."""
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

    def _new_blocks(self, step: StepBatch, num_known: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return sequence and column of each block new to the device. num_known: [seqs] int64."""
        num_new = np.maximum(self._blocks_of(step) - num_known, 0)
        seqs = np.repeat(np.arange(len(num_new)), num_new)
        firsts = np.cumsum(num_new) - num_new
        return seqs, np.arange(len(seqs)) + np.repeat(num_known - firsts, num_new)

    def _blocks_of(self, step: StepBatch) -> NDArray[np.int64]:
        return -(-step.context_lens // self._block_size)


WriteRows = Callable[[RowMemory, RowWrites, Tensor | None], None]

#: The sampler's columns of 8 and of 4 bytes. The host writes those, and before the wide ones next token and position.
WIDE, NARROW = ([name for name in ROW.names or () if ROW[name].itemsize == size] for size in (8, 4))
NUM_WIDE, NUM_NARROW = 2 + len(WIDE), len(NARROW)
NONE: NDArray[np.int64] = np.zeros(0, np.int64)
NO_BLOCKS = NO_ORDER = np.zeros(0, np.int32)


class StaticRows:
    """max_num_seqs rows, all padding at first. indices: [rows] int32, 0, 1, 2, ...  order: as of RowChanges."""

    def __init__(
        self, max_num_seqs: int, max_blocks: int, block_size: int, device: torch.device, write_rows: WriteRows
    ) -> None:
        self._max_blocks, self._write_rows = max_blocks, write_rows
        pitch = -(-max_num_seqs // ALIGNMENT) * ALIGNMENT  # so that each column is aligned
        wide = torch.zeros((NUM_WIDE, pitch), dtype=torch.int64, device=device)
        narrow = torch.zeros((NUM_NARROW, pitch), dtype=torch.int32, device=device)
        inputs = torch.zeros((4, pitch), dtype=torch.int64, device=device)[:, :max_num_seqs]
        next_token_ids, next_positions, *of_sampler = wide[:, :max_num_seqs]
        columns = dict(zip(WIDE, of_sampler, strict=True))
        for name, column in zip(NARROW, narrow[:, :max_num_seqs], strict=True):
            columns[name] = column.view(getattr(torch, ROW[name].name))
        self.state = DecodeState(
            next_token_ids,
            next_positions,
            block_tables=torch.zeros((max_num_seqs, max_blocks), dtype=torch.int32, device=device),
            sampling=SamplingRows(**columns, position=inputs[0]),
            token_ids=inputs[1],
            positions=inputs[2],
            slot_mapping=inputs[3],
            context_lens=torch.zeros(max_num_seqs, dtype=torch.int32, device=device),
            block_size=block_size,
        )
        self.indices = torch.arange(max_num_seqs, dtype=torch.int32, device=device)
        self.order = torch.empty_like(self.indices)
        self._memory = RowMemory(wide, narrow, self.state.block_tables, self.order)
        self._fill_with_padding(max_num_seqs)

    def _fill_with_padding(self, max_num_seqs: int) -> None:
        """Write padding as steps write rows, so that the kernel is compiled before the first step."""
        rows = np.arange(max_num_seqs)
        wide, narrow = _padding(max_num_seqs)
        none_sampled = np.full(max_num_seqs, -1)
        order = rows.astype(np.int32)
        self._write_rows(self._memory, RowWrites(rows, wide, narrow, none_sampled, NONE, NO_BLOCKS, order), None)

    def write(self, changes: RowChanges, step: StepBatch, sampling: SamplingBatch, last: Sampled | None) -> None:
        """Write the changes in one transfer. last: the tokens of the step launched before."""
        if changes.order is None and not len(changes.block_ids):
            return
        wide, narrow = _values(changes, step, sampling)
        writes = RowWrites(
            np.concatenate((changes.rows, changes.padding)),
            wide,
            narrow,
            _sampled_at(changes, step, last),
            changes.table_rows * self._max_blocks + changes.table_columns,
            changes.block_ids,
            NO_ORDER if changes.order is None else changes.order,
        )
        self._write_rows(self._memory, writes, None if last is None else last.token_ids)


def _sampled_at(changes: RowChanges, step: StepBatch, last: Sampled | None) -> NDArray[np.int64]:
    """Return where the step before sampled the token of each written row; -1 if it is known."""
    places = np.full(len(changes.seqs) + len(changes.padding), -1)
    if len(step.pending_rows) and len(changes.seqs):
        assert last is not None, "only a step that follows another has pending rows"
        place_of_seq = np.full(len(step.slots), -1)
        place_of_seq[step.pending_rows] = last.places[step.pending_samples]
        places[: len(changes.seqs)] = place_of_seq[changes.seqs]
    return places


def _padding(num_rows: int) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Return the wide and the narrow columns of rows that belong to no sequence."""
    wide = np.zeros((NUM_WIDE, num_rows), np.int64)
    wide[1] = PADDING
    return wide, np.zeros((NUM_NARROW, num_rows), np.int32)


def _values(
    changes: RowChanges, step: StepBatch, sampling: SamplingBatch
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Return the values of each row, padding last: the wide columns, and the narrow ones."""
    seqs = changes.seqs
    values = sampling.values[seqs]
    wide, narrow = _padding(len(seqs) + len(changes.padding))
    wide[:, : len(seqs)] = (step.token_ids[seqs], step.positions[seqs], *(values[name].view(np.int64) for name in WIDE))
    narrow[:, : len(seqs)] = [values[name].view(np.int32) for name in NARROW]
    return wide, narrow
