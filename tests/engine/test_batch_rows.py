"""The rows on the device, told of changes alone, are at every step what the whole batch would have told."""

import random
from collections.abc import Iterable
from dataclasses import fields, replace
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from engine.run.forward.rows import BatchRows, RowChanges, StaticRows, WriteRows
from engine.run.forward.runner import Sampled
from engine.sampling.sampling_batch import SamplingBatch, neutral_rows
from engine.schedule.step_batch import StepBatch
from tests.engine.graphs import advance, write_rows
from tests.engine.shadow import ShadowDevice
from tests.engine.test_histories import play, random_history

CPU = torch.device("cpu")
MAX_NUM_SEQS, MAX_MODEL_LEN, BLOCK = 6, 40, 4


class RowsDevice(ShadowDevice):
    """Computes decode steps out of static rows, as a graph does, and other steps as they come."""

    write_rows: ClassVar[WriteRows] = staticmethod(write_rows)

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self.rows = BatchRows(MAX_NUM_SEQS, block_size)
        self.static = StaticRows(MAX_NUM_SEQS, -(-MAX_MODEL_LEN // block_size), block_size, CPU, self.write_rows)
        self.last: Sampled | None = None
        self.num_decode_steps = self.num_written = self.num_left = 0

    def compute(self, step: StepBatch, only: Iterable[int | None] = ()) -> NDArray[np.int64]:
        one_each = len(step.slots) == len(step.token_ids) == len(step.sample_rows)
        if step.wants_logprobs or not one_each:
            sampled = super().compute(step, only)
            self.last = Sampled(torch.from_numpy(sampled.copy()), np.arange(len(sampled)))
            return sampled
        rows, changes = self.rows.update(step)
        self.static.write(changes, step, sampling_of(step), self.last)
        advance(self.static.state)
        of_samples = dict(zip(rows.tolist(), only, strict=False))
        in_row_order = super().compute(
            self._as_step(step, rows), [of_samples[row] for row in range(len(rows))] if of_samples else ()
        )
        state = self.static.state
        state.next_token_ids[: len(rows)] = torch.from_numpy(in_row_order)
        state.next_token_ids[len(rows) :] = 99  # what is sampled from padding may be anything
        self.last = Sampled(state.next_token_ids[: len(rows)], rows)
        self.num_decode_steps += 1
        self.num_written += len(changes.seqs)
        self.num_left += len(changes.padding) > 0
        self.sampled = in_row_order[rows]
        return self.sampled

    def _as_step(self, step: StepBatch, rows: NDArray[np.int64]) -> StepBatch:
        """What the device holds, as a step in the order of its rows, each compared with the step's own."""
        state, num_seqs = self.static.state, len(rows)
        assert sorted(rows) == list(range(num_seqs))
        assert state.slot_mapping[num_seqs:].tolist() == [-1] * (MAX_NUM_SEQS - num_seqs)
        assert state.context_lens[num_seqs:].tolist() == [0] * (MAX_NUM_SEQS - num_seqs)
        token_ids = state.token_ids.numpy()[rows]
        token_ids[step.pending_rows] = step.token_ids[step.pending_rows]
        assert token_ids.tolist() == step.token_ids.tolist()
        for found, wanted in (
            (state.positions, step.positions),
            (state.slot_mapping, step.slot_mapping),
            (state.context_lens, step.context_lens),
            (state.sampling.position, step.context_lens),
        ):
            assert found.numpy()[rows].tolist() == wanted.tolist()
        values = sampling_of(step).values
        for name in ("temperature", "top_p", "top_k", "min_p", "seed", "sample_index"):
            found = getattr(state.sampling, name).numpy()[rows]
            assert found.tolist() == values[name].astype(found.dtype).tolist()
        order = np.argsort(rows)
        return replace(
            step,
            token_ids=state.token_ids[:num_seqs].numpy().copy(),
            positions=step.positions[order],
            slot_mapping=step.slot_mapping[order],
            block_tables=state.block_tables[:num_seqs].numpy(),
            context_lens=step.context_lens[order],
            pending_rows=step.pending_rows[:0],
            pending_samples=step.pending_samples[:0],
        )


def sampling_of(step: StepBatch) -> SamplingBatch:
    """Values that differ from one giving of a slot to the next, so that another's show."""
    values = neutral_rows(len(step.slots))
    for name in ("temperature", "top_p", "min_p", "top_k", "seed", "sample_index"):
        values[name] = step.generations + 1
    return SamplingBatch(values, step.context_lens.astype(np.uint64))


def play_histories(num_histories: int, make_device: type[RowsDevice] = RowsDevice) -> list[RowsDevice]:
    """Random histories of joins, leaves, preemption, aborts and failed steps, half of them with overlap."""
    devices = []
    for seed in range(num_histories):
        rng = random.Random(seed)
        sizes = {
            "num_blocks": rng.choice((10, 11, 16, 30)), "max_num_seqs": rng.randrange(2, MAX_NUM_SEQS + 1),
            "max_num_batched_tokens": rng.choice((7, 12, 40)), "max_model_len": MAX_MODEL_LEN,
            "overlap": seed % 2 == 0,
        }  # fmt: skip
        shadow = play(random_history(seed), sizes, make_device=make_device)
        assert isinstance(shadow.device, RowsDevice)
        devices.append(shadow.device)
    return devices


def test_rows_on_the_device_are_those_of_the_batch_through_random_histories() -> None:
    """Each sequence ends with its own tokens, which depend on all of its blocks and positions."""
    devices = play_histories(50)
    assert sum(device.num_decode_steps for device in devices) > 300
    assert sum(device.num_written for device in devices) < 0.6 * sum(
        device.num_decode_steps * 3 for device in devices
    ), "most rows advance by themselves"
    assert sum(device.num_left for device in devices) > 30


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
