"""The rows of a decode batch on the device: which sequence has which row, and the memory that graphs read."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.attention.decode_state import PADDING, DecodeState, RowMemory, RowWrites
from engine.attention.prefix_groups import PrefixArrays, PrefixLimits, PrefixTensors
from engine.attention.state_pool import StateTable
from engine.kernels.upload import ALIGNMENT, unpack, upload, upload_packed
from engine.run.forward.runner import Sampled
from engine.sampling.sampling_batch import ROW, SamplingBatch
from engine.sampling.sampling_rows import SamplingRows
from engine.schedule.sequence import NO_ADAPTER
from engine.schedule.step_batch import StepBatch

WriteRows = Callable[[RowMemory, RowWrites, Tensor | None], None]

#: The sampler's columns of 8 and of 4 bytes. The host writes them; before the wide ones come next token and position.
WIDE, NARROW = ([name for name in ROW.names or () if ROW[name].itemsize == size] for size in (8, 4))
NUM_WIDE, NUM_NARROW = 2 + len(WIDE), len(NARROW)
NONE: NDArray[np.int64] = np.zeros(0, np.int64)
NO_BLOCKS = NO_ORDER = np.zeros(0, np.int32)


class StaticRows:
    """The max_num_seqs rows: first those of the last step, then padding. At the start all are padding.

    indices: [rows] int32, 0, 1, 2, ...  order: [rows] int32, all rows, the longest contexts first, padding last.
    limits: say which of the prefixes that rows have in common are read once; None if no prefix is.
    prefixes: the prefixes that are read once; None without limits. has_prefixes: whether the last step has any.
    adapters: [rows] int64, the adapter of each, no_adapter for none. They are valid only while has_adapters is True.
    states: None if the model keeps none.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_blocks: int,
        block_size: int,
        device: torch.device,
        write_rows: WriteRows,
        limits: PrefixLimits | None = None,
        *,
        has_states: bool = False,
        no_adapter: int = 0,
    ) -> None:
        """has_states: whether the model keeps states. no_adapter: stands in `adapters` for a row without one."""
        self._max_blocks = max_blocks
        self._write_rows = write_rows
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
        self.states = StateTable(max_num_seqs, device) if has_states else None
        self._memory = RowMemory(wide, narrow, self.state.block_tables, self.order)
        self.prefixes: PrefixTensors | None = None
        self.has_prefixes = False
        self.limits = limits
        self._written_prefixes: PrefixArrays | None = None
        if limits is not None:
            none = limits.arrange([], max_num_seqs)
            self._prefix_memory = upload_packed(none, device)
            self.prefixes = PrefixTensors(*unpack(self._prefix_memory, none))
        self.adapters = torch.full((max_num_seqs,), no_adapter, dtype=torch.int64, device=device)
        self.has_adapters = False
        self._no_adapter = no_adapter
        self._written_adapters: NDArray[np.int64] | None = None
        self._block_size = block_size
        self._row_of_slot: NDArray[np.int64] = np.zeros(max_num_seqs, np.int64)
        self._generations: NDArray[np.int64] = np.zeros(max_num_seqs, np.int64)
        # the position that each row computes next
        self._positions: NDArray[np.int64] = np.zeros(max_num_seqs, np.int64)
        self._num_blocks: NDArray[np.int64] = np.zeros(max_num_seqs, np.int64)
        self.forget()
        # written as steps write rows, so that the kernel is compiled before the first step
        rows = np.arange(max_num_seqs)
        none_sampled = np.full(max_num_seqs, -1)
        writes = RowWrites(
            rows, *_padding(max_num_seqs), none_sampled, NONE, NO_BLOCKS, rows.astype(np.int32)
        )
        write_rows(self._memory, writes, None)

    def forget(self) -> None:
        """Forget what the device knows: the next step writes all rows."""
        self._generations.fill(-1)
        self._num_filled = len(self._generations)
        self._written_prefixes = None
        self._written_adapters = None

    def write(
        self, step: StepBatch, sampling: SamplingBatch, last: Sampled | None
    ) -> NDArray[np.int64]:
        """Write what changed, in one transfer; return the row of each sequence, [seqs] int64.

        The sequences have the first rows, in any order: each keeps its row while it can. Afterwards the step counts
        as computed, so launch it.  last: the tokens of the step launched before.
        """
        num_seqs = len(step.slots)
        rows = self._place(step)
        num_blocks = -(-step.context_lens // self._block_size)
        is_new = self._generations[rows] != step.generations
        written = np.flatnonzero(is_new | (self._positions[rows] != step.positions))
        padding = np.arange(num_seqs, max(num_seqs, self._num_filled))
        table_seqs, columns = _ranges(np.where(is_new, 0, self._num_blocks[rows]), num_blocks)
        has_moved = len(written) > 0 or len(padding) > 0
        if has_moved or len(table_seqs):
            wide, narrow = _values(step, sampling, written, len(padding))
            writes = RowWrites(
                np.concatenate((rows[written], padding)),
                wide,
                narrow,
                _sampled_at(step, written, len(padding), last),
                rows[table_seqs] * self._max_blocks + columns,
                step.block_tables[table_seqs, columns],
                self._order(rows, step.context_lens) if has_moved else NO_ORDER,
            )
            self._write_rows(self._memory, writes, None if last is None else last.token_ids)
        # prefixes change only if a row moves: while a sequence keeps its row, it keeps its blocks
        if has_moved and self.limits is not None:
            self._write_prefixes(self.limits, step, rows)
        self.has_adapters = len(step.adapters) > 0
        if self.has_adapters:
            self._write_adapters(step.adapters, rows)
        if self.states is not None:
            self.states.write(step.state_parts, rows)
        self._generations[rows] = step.generations
        self._positions[rows] = step.positions + 1
        self._num_blocks[rows] = num_blocks
        self._generations[num_seqs:] = -1
        self._num_filled = num_seqs
        return rows

    def _write_prefixes(
        self, limits: PrefixLimits, step: StepBatch, rows: NDArray[np.int64]
    ) -> None:
        """Find the prefixes that the step's sequences have in common; write them if they differ from the last ones."""
        prefixes = limits.find(step.block_tables, step.context_lens)
        self.has_prefixes = len(prefixes) > 0
        by_row = [replace(prefix, seqs=rows[prefix.seqs]) for prefix in prefixes]
        arrays = limits.arrange(by_row, len(self._generations))
        written = self._written_prefixes
        if written is None or not all(map(np.array_equal, arrays, written)):
            self._prefix_memory.copy_(upload_packed(arrays, self._prefix_memory.device))
            self._written_prefixes = arrays

    def _write_adapters(self, adapters: NDArray[np.int64], rows: NDArray[np.int64]) -> None:
        """Write the adapters of the step's sequences if they differ from those written last."""
        by_row = np.full(len(self._generations), self._no_adapter)
        by_row[rows] = np.where(adapters == NO_ADAPTER, self._no_adapter, adapters)
        written = self._written_adapters
        if written is None or not np.array_equal(by_row, written):
            self.adapters.copy_(upload([by_row], self.adapters.device)[0])
            self._written_adapters = by_row

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


def _ranges(
    starts: NDArray[np.int64], ends: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """List the numbers of all ranges. Return two arrays: for each number the index of its range, and the numbers."""
    counts = np.maximum(ends - starts, 0)
    owners = np.repeat(np.arange(len(counts)), counts)
    return owners, np.arange(len(owners)) + np.repeat(starts - (np.cumsum(counts) - counts), counts)


def _sampled_at(
    step: StepBatch, written: NDArray[np.int64], num_padding: int, last: Sampled | None
) -> NDArray[np.int64]:
    """Return, for each written row, where the step before sampled its token; -1 if the token is known."""
    places = np.full(len(written) + num_padding, -1)
    if len(step.pending_rows) and len(written):
        assert last is not None, "only a step that follows another has pending rows"
        place_of_seq = np.full(len(step.slots), -1)
        place_of_seq[step.pending_rows] = last.places[step.pending_samples]
        places[: len(written)] = place_of_seq[written]
    return places


def _padding(num_rows: int) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Return the wide and the narrow columns of rows that belong to no sequence."""
    wide = np.zeros((NUM_WIDE, num_rows), np.int64)
    wide[1] = PADDING  # column 1 holds the positions
    return wide, np.zeros((NUM_NARROW, num_rows), np.int32)


def _values(
    step: StepBatch, sampling: SamplingBatch, seqs: NDArray[np.int64], num_padding: int
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Return the wide and the narrow columns of the written rows, padding last."""
    values = sampling.values[seqs]
    wide, narrow = _padding(len(seqs) + num_padding)
    wide[:, : len(seqs)] = (
        step.token_ids[seqs],
        step.positions[seqs],
        *(values[name].view(np.int64) for name in WIDE),
    )
    narrow[:, : len(seqs)] = [values[name].view(np.int32) for name in NARROW]
    return wide, narrow
