"""The kernels that begin a recorded step and write its rows do what their torch references do, bit by bit."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed, so its kernels cannot run")

from typing import Any

import pytest

from engine.attention.decode_state import PADDING, DecodeState, advance
from engine.attention.row_writes import RowMemory, RowWrites, write_rows
from engine.attention.triton_backend import TritonBackend
from engine.run.static_rows import StaticRows
from tests.engine.paged import DEVICE

pytestmark = pytest.mark.long

WIDE, NARROW, WIDTH = 4, 4, 7


def memory(num_rows: int) -> RowMemory:
    """Full of numbers, each another one; the columns have room behind their rows."""
    pitch = num_rows + 16 - num_rows % 16

    def filled(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return -1 - torch.arange(int(np.prod(shape)), dtype=dtype).view(shape).to(DEVICE)

    return RowMemory(
        filled(WIDE, pitch, dtype=torch.int64) * 2**33,
        filled(NARROW, pitch, dtype=torch.int32),
        filled(num_rows, WIDTH, dtype=torch.int32),
        filled(num_rows, dtype=torch.int32),
    )


def writes(rng: np.random.Generator, num_rows: int, written: int, num_blocks: int) -> RowWrites:
    """Any of the rows, in any order, half of them with a token that the step before has sampled."""
    return RowWrites(
        rows=rng.permutation(num_rows)[:written],
        wide=rng.integers(-(2**63), 2**63, (WIDE, written)),
        narrow=rng.integers(-(2**31), 2**31, (NARROW, written)).astype(np.int32),
        sampled_at=np.where(rng.random(written) < 0.5, rng.integers(0, num_rows, written), -1),
        table_places=rng.permutation(num_rows * WIDTH)[:num_blocks],
        block_ids=rng.integers(0, 2**31, num_blocks).astype(np.int32),
        order=rng.permutation(num_rows).astype(np.int32) if written else np.zeros(0, np.int32),
    )


@pytest.mark.parametrize(
    ("num_rows", "written", "num_blocks"),
    [
         (1, 0, 1), (2, 1, 3), (9, 9, 63), (300, 0, 512), (300, 7, 513), (600, 512, 1),
        (600, 513, 0), (1100, 1100, 7700),
    ],
)  # fmt: skip
@pytest.mark.parametrize("in_memory", [True, False])
def test_it_equals_the_reference(num_rows: int, written: int, num_blocks: int, in_memory: bool) -> None:
    """Of as many rows and entries as a program takes at once, of fewer and of more; the rest stays as it is.

    in_memory: what was sampled lies in the rows that are written, as it does between two steps of graphs.
    """
    rng = np.random.default_rng(num_rows + num_blocks)
    new = writes(rng, num_rows, written, num_blocks)
    others = torch.from_numpy(rng.integers(0, 2**40, num_rows)).to(DEVICE)
    found, expected = memory(num_rows), memory(num_rows)
    for into, write in ((found, TritonBackend(DEVICE).write_rows), (expected, write_rows)):
        write(into, new, into.wide[0, :num_rows] if in_memory else others)
    for each in fields(RowMemory):
        assert torch.equal(getattr(found, each.name), getattr(expected, each.name)), each.name
    assert not torch.equal(found.wide, memory(num_rows).wide) or not written


def test_rows_that_change_places_change_their_tokens() -> None:
    """Each of two rows is written with what the other has sampled, so neither may be written too early."""
    new = writes(np.random.default_rng(1), 2, 2, 0)
    new = replace(new, rows=np.array([0, 1]), sampled_at=np.array([1, 0]))
    found = memory(2)
    before = found.wide[0, :2].tolist()
    TritonBackend(DEVICE).write_rows(found, new, found.wide[0, :2])
    assert found.wide[0, :2].tolist() == before[::-1]


def filled(num_rows: int, block_size: int, seed: int) -> DecodeState:
    """Rows at any place of their sequences, some of them padding, some without a token."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, shape: Any) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    static = StaticRows(num_rows + 3, 40, block_size, DEVICE)
    state = static.state.first(num_rows)
    state.next_token_ids.copy_(draw(-1, 152_000, (num_rows,)))
    state.next_positions.copy_(draw(0, 40 * block_size, (num_rows,)))
    state.next_positions[draw(0, 4, (num_rows,)) == 0] = PADDING
    state.block_tables.copy_(draw(0, 2**31 - 1, state.block_tables.shape))
    for stale in (state.token_ids, state.positions, state.slot_mapping, state.context_lens):
        stale.fill_(77)
    return state


@pytest.mark.parametrize("num_rows", [1, 2, 127, 128, 129, 300])
@pytest.mark.parametrize("block_size", [1, 16, 48])
def test_a_step_begins_as_by_the_reference(num_rows: int, block_size: int) -> None:
    """Twice in a row: the second step starts from what the first has left."""
    found, expected = (filled(num_rows, block_size, seed=num_rows) for _ in range(2))
    backend = TritonBackend(DEVICE)
    for _ in range(2):
        backend.advance(found)
        advance(expected)
        for each in fields(DecodeState):
            if isinstance(getattr(found, each.name), torch.Tensor):
                assert torch.equal(getattr(found, each.name), getattr(expected, each.name)), each.name
        assert torch.equal(found.sampling.position, expected.sampling.position)
        for state in (found, expected):
            state.next_positions.clamp_(max=40 * block_size - 1)


def test_nothing_past_the_rows_is_written() -> None:
    """A smaller graph leaves the rows behind its own alone."""
    static = StaticRows(200, 3, 16, DEVICE)
    static.state.next_positions.fill_(5)
    TritonBackend(DEVICE).advance(static.state.first(130))
    assert static.state.next_positions.tolist() == [6] * 130 + [5] * 70
    assert static.state.slot_mapping[130:].tolist() == [0] * 70
