"""Rows on the device are told of changes alone; test_determinism.py holds what they compute."""

from dataclasses import fields, replace

import numpy as np
import torch

from engine.run.forward.rows import BatchRows, RowChanges
from engine.schedule.step_batch import StepBatch

CPU = torch.device("cpu")
MAX_NUM_SEQS, MAX_MODEL_LEN, BLOCK = 6, 40, 4


def test_after_a_failed_launch_every_row_is_written_again() -> None:
    """What the device holds then nobody knows."""
    rows = BatchRows(MAX_NUM_SEQS, BLOCK)
    lens = np.array([5, 9])
    step = StepBatch(
        lens, lens - 1, lens, np.arange(2), np.ones((2, 3), np.int32), lens, np.ones_like(lens),
        slots=np.array([3, 1]), generations=np.array([7, 8]),
    )  # fmt: skip
    first = rows.update(step)[1]
    assert first.padding.tolist() == [2, 3, 4, 5]
    again = replace(step, positions=lens, context_lens=lens + 1)
    nothing = rows.update(again)[1]
    assert nothing.order is None
    assert not any(len(getattr(nothing, each.name)) for each in fields(RowChanges) if each.name != "order")
    rows.forget()
    after = rows.update(replace(step, positions=lens + 1, context_lens=lens + 2))[1]
    assert after.rows.tolist() == [0, 1]
    assert after.padding.tolist() == [2, 3, 4, 5]
    assert len(after.block_ids) == 2 + 3
    assert after.order is not None
    assert after.order.tolist() == [1, 0, 2, 3, 4, 5]
