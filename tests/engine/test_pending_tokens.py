"""Tokens that the step before chooses reach the rows that compute them."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed, so its kernels cannot run")

from engine.attention.torch_backend import TorchBackend
from engine.attention.triton_backend import TritonBackend
from engine.kernels.pending import TILE
from tests.engine.paged import DEVICE


@pytest.mark.parametrize("num_pending", [1, 3, TILE, TILE + 1])
def test_the_kernel_fills_the_rows_that_the_reference_fills(num_pending: int) -> None:
    """Wherever they lie, whatever the others hold; none chosen becomes 0."""
    numbers = torch.Generator().manual_seed(num_pending)
    token_ids = torch.randint(5, 100, (2 * num_pending,), generator=numbers)
    sampled = torch.randint(-1, 4, (num_pending + 5,), generator=numbers)
    sampled[0] = -1
    rows = torch.randperm(2 * num_pending, generator=numbers)[:num_pending]
    places = torch.randperm(num_pending + 5, generator=numbers)[:num_pending]
    expected, found = token_ids.clone(), token_ids.clone().to(DEVICE)
    TorchBackend(torch.device("cpu")).fill_pending(expected, rows, sampled, places)
    TritonBackend(DEVICE).fill_pending(found, rows.to(DEVICE), sampled.to(DEVICE), places.to(DEVICE))
    assert torch.equal(found.cpu(), expected)
