"""The kernel that begins a recorded step does what its torch reference does, bit by bit."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed, so its kernels cannot run")

from engine.attention.decode_state import PADDING, DecodeState, advance
from engine.attention.triton_backend import TritonBackend
from engine.run.forward.static_rows import StaticRows
from tests.engine.paged import DEVICE

pytestmark = pytest.mark.long


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
def test_it_equals_the_reference(num_rows: int, block_size: int) -> None:
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
