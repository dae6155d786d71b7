"""Rows on the device are told of changes alone; test_determinism.py holds what they compute."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from engine.attention.decode_state import RowWrites
from engine.attention.prefix_groups import PrefixLimits
from engine.run.forward import rows as rows_module
from engine.run.forward.rows import StaticRows
from engine.sampling.sampling_batch import SamplingBatch, neutral_rows
from engine.schedule.step_batch import StepBatch

MAX_NUM_SEQS, MAX_BLOCKS, BLOCK = 6, 10, 4


def test_after_a_failed_launch_every_row_is_written_again() -> None:
    """What the device holds then nobody knows."""
    written: list[RowWrites] = []

    def note(memory: Any, writes: RowWrites, sampled: Any) -> None:
        written.append(writes)

    rows = StaticRows(MAX_NUM_SEQS, MAX_BLOCKS, BLOCK, torch.device("cpu"), note)
    lens = np.array([5, 9])
    sampling = SamplingBatch(neutral_rows(2), lens.astype(np.uint64))
    step = StepBatch(
        lens, lens - 1, lens, np.arange(2), np.ones((2, 3), np.int32), lens, np.ones_like(lens),
        slots=np.array([3, 1]), generations=np.array([7, 8]),
    )  # fmt: skip
    written.clear()
    assert rows.write(step, sampling, None).tolist() == [0, 1]
    assert written.pop().rows.tolist() == [0, 1, 2, 3, 4, 5]
    rows.write(replace(step, positions=lens, context_lens=lens + 1), sampling, None)
    assert not written
    rows.forget()
    rows.write(replace(step, positions=lens + 1, context_lens=lens + 2), sampling, None)
    (after,) = written
    assert after.rows.tolist() == [0, 1, 2, 3, 4, 5]
    assert after.wide[1].tolist() == [6, 10, -1, -1, -1, -1]
    assert len(after.block_ids) == 2 + 3
    assert after.order.tolist() == [1, 0, 2, 3, 4, 5]


def decodes(slots: list[int], context_len: int, own_from: int) -> StepBatch:
    """Sequences of these slots, whose blocks are the same before the column own_from."""
    seqs = np.array(slots)
    lens = np.full(len(seqs), context_len)
    tables = np.tile(np.arange(MAX_BLOCKS, dtype=np.int32), (len(seqs), 1))
    tables[:, own_from:] += 100 * (1 + seqs[:, None].astype(np.int32))
    return StepBatch(
        lens, lens - 1, lens, np.arange(len(seqs)), tables, lens, np.ones_like(lens),
        slots=seqs, generations=seqs,
    )  # fmt: skip


def test_prefixes_are_written_where_rows_have_others_than_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows that join and leave change them; a step in which all go on writes nothing."""
    limits = PrefixLimits(1, least_spared_bytes=20, block_size=BLOCK, tile=BLOCK, tile_seqs=4)
    rows = StaticRows(MAX_NUM_SEQS, MAX_BLOCKS, BLOCK, torch.device("cpu"), lambda *_: None, limits)
    assert rows.prefixes is not None
    num_writes = 0
    upload = rows_module.upload_packed

    def count(arrays: Any, device: torch.device) -> torch.Tensor:
        nonlocal num_writes
        num_writes += 1
        return upload(arrays, device)

    monkeypatch.setattr(rows_module, "upload_packed", count)

    def begins_after(step: StepBatch) -> list[int]:
        sampling = SamplingBatch(neutral_rows(len(step.slots)), step.positions.astype(np.uint64))
        rows.write(step, sampling, None)
        assert rows.prefixes is not None
        return rows.prefixes.begins.tolist()

    assert begins_after(decodes([0, 1, 2], 20, own_from=3)) == [12, 12, 12, 0, 0, 0]
    assert rows.prefixes.members.tolist()[0] == [0, 1, 2, -1]
    assert rows.prefixes.num_tiles.tolist() == [1]
    begins_after(decodes([0, 1, 2], 21, own_from=3))
    assert num_writes == 1
    begins = begins_after(decodes([0, 2], 22, own_from=3))
    assert (begins, rows.has_prefixes, num_writes) == ([0] * 6, False, 2), "two spare too little"
    assert rows.prefixes.num_tiles.tolist() == [0]
    begins = begins_after(decodes([0, 2, 4, 5], 23, own_from=3))
    assert (begins, rows.has_prefixes, num_writes) == ([12, 12, 12, 12, 0, 0], True, 3)
    rows.forget()
    begins_after(decodes([0, 2, 4, 5], 24, own_from=3))
    assert num_writes == 4
