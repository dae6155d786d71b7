"""Rows on the device are told of changes alone; test_determinism.py holds what they compute."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from engine.attention.decode_state import RowWrites
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
