"""StaticRows: the memory behind the rows that graphs read, and how the host writes to it."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from engine.attention.decode_state import PADDING, DecodeState
from engine.kernels.upload import ALIGNMENT, upload
from engine.run.batch_rows import RowChanges
from engine.run.pending_tokens import Sampled
from engine.sampling.sampling_batch import SamplingBatch
from engine.sampling.sampling_rows import SamplingRows
from engine.schedule.step_batch import StepBatch

NUM_WIDE, NUM_NARROW = 4, 4  # columns of 8 and of 4 bytes that the host writes
NO_ORDER: NDArray[np.int32] = np.zeros(0, np.int32)


class StaticRows:
    """max_num_seqs rows, all padding at first. What the host writes of a row lies in two tensors.

    indices: [rows] int32, 0, 1, 2, ...  order: [rows] int32, of the rows, the longest contexts first; the
    first n of it are of the first n rows, for every n from the number of sequences on.
    """

    def __init__(self, max_num_seqs: int, max_blocks: int, block_size: int, device: torch.device) -> None:
        self._device, self._max_blocks = device, max_blocks
        pitch = -(-max_num_seqs // ALIGNMENT) * ALIGNMENT  # so that each column is aligned
        self._wide = torch.zeros((NUM_WIDE, pitch), dtype=torch.int64, device=device)
        self._narrow = torch.zeros((NUM_NARROW, pitch), dtype=torch.int32, device=device)
        inputs = torch.zeros((4, pitch), dtype=torch.int64, device=device)[:, :max_num_seqs]
        next_token_ids, next_positions, seed, sample_index = self._wide[:, :max_num_seqs]
        temperature, top_p, min_p = self._narrow[:3, :max_num_seqs].view(torch.float32)
        next_positions.fill_(PADDING)
        sampling = SamplingRows(
            temperature, top_p, min_p, self._narrow[3, :max_num_seqs], seed, sample_index, position=inputs[0]
        )
        self.state = DecodeState(
            next_token_ids,
            next_positions,
            block_tables=torch.zeros((max_num_seqs, max_blocks), dtype=torch.int32, device=device),
            sampling=sampling,
            token_ids=inputs[1],
            positions=inputs[2],
            slot_mapping=inputs[3],
            context_lens=torch.zeros(max_num_seqs, dtype=torch.int32, device=device),
            block_size=block_size,
        )
        self.indices = torch.arange(max_num_seqs, dtype=torch.int32, device=device)
        self.order = self.indices.clone()

    def write(
        self, changes: RowChanges, step: StepBatch, sampling: SamplingBatch, last: Sampled | None
    ) -> None:
        """Write what has changed, in one transfer; nothing where nothing has.

        last: what the step launched before has sampled, for the pending tokens among it.
        """
        num_blocks = len(changes.block_ids)
        if changes.order is None and not num_blocks:
            return
        order, rows, wide, narrow, table_places, block_ids, pending_rows, places = upload(
            [
                NO_ORDER if changes.order is None else changes.order,
                np.concatenate((changes.rows, changes.padding)),
                *_values(changes, step, sampling),
                changes.table_rows * self._max_blocks + changes.table_columns,
                changes.block_ids,
                *_pending(changes, step, last),
            ],
            self._device,
        )
        if num_blocks:
            self.state.block_tables.view(-1).index_copy_(0, table_places, block_ids)
        if changes.order is None:
            return
        self.order.copy_(order)
        # before the rows are written that it may lie in
        pending = last.token_ids[places] if last is not None and len(places) else None
        self._wide.index_copy_(1, rows, wide)
        self._narrow.index_copy_(1, rows, narrow)
        if pending is not None:
            self.state.next_token_ids.index_copy_(0, pending_rows, pending)


def _pending(
    changes: RowChanges, step: StepBatch, last: Sampled | None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The written rows whose token is not known yet, and where the step before has sampled it."""
    none = np.zeros(0, np.int64)
    if not len(step.pending_rows):
        return none, none
    assert last is not None, "only a step that follows another has pending rows"
    place_of_seq = np.full(len(step.slots), -1)
    place_of_seq[step.pending_rows] = last.places[step.pending_samples]
    places = place_of_seq[changes.seqs]
    return changes.rows[places >= 0], places[places >= 0]


def _values(
    changes: RowChanges, step: StepBatch, sampling: SamplingBatch
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """What to write of each row, those of padding last: the wide columns, and the narrow ones."""
    seqs, num_rows = changes.seqs, len(changes.seqs) + len(changes.padding)
    values = sampling.values[seqs]
    wide = np.zeros((NUM_WIDE, num_rows), np.int64)
    wide[1] = PADDING
    wide[:, : len(seqs)] = (
        step.token_ids[seqs],
        step.positions[seqs],
        values["seed"].view(np.int64),
        values["sample_index"].view(np.int64),
    )
    narrow = np.zeros((NUM_NARROW, num_rows), np.int32)
    narrow[:, : len(seqs)] = (
        *(values[name].view(np.int32) for name in ("temperature", "top_p", "min_p")),
        values["top_k"],
    )
    return wide, narrow
