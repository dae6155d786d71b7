"""The decode kernel's splits, programs and counters do not show: what they compute is float64 attention."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed, so its kernels cannot run")

from engine.kernels.attention import decode as decode_attention
from tests.engine.paged import TOLERANCE, PagedBatch, make_batch

pytestmark = pytest.mark.long


def named(batch: PagedBatch) -> dict[str, Any]:
    """What the kernels are told of the layer's attention."""
    names = ("scale", "window", "chunk", "soft_cap", "sinks")
    return {name: getattr(batch, name) for name in names}


def decode(batch: PagedBatch, *, split: int, programs: int, arrived: torch.Tensor) -> torch.Tensor:
    """Run the decode kernel in splits on one query a sequence, over NaN scratch; two more rows stay poisoned."""
    rows = decode_attention.DecodeRows(
        batch.tensor(np.arange(len(batch.query))), batch.tensor(batch.context_lens),
        batch.tensor(batch.block_tables), int(batch.context_lens.max()), None,
    )  # fmt: skip
    out = batch.poisoned_output(num_more_rows=2)
    with poisoned_scratch():
        decode_attention.decode_attention(
            batch.query, batch.cache, rows, arrived, out, programs, split_tokens=split, **named(batch)
        )  # fmt: skip
    assert out[len(batch.query) :].isnan().all()
    return out


def counters(batch: PagedBatch) -> torch.Tensor:
    return batch.tensor(np.zeros(len(batch.query) * batch.key_cache.shape[2]))


@contextmanager
def poisoned_scratch() -> Iterator[None]:
    """torch.empty gives NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # which fills what it does not initialise
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def test_a_launch_leaves_the_counters_to_the_next() -> None:
    """Launch upon launch over the same counters, as graphs are replayed; contexts grow meanwhile."""
    arrived = counters(make_batch([1, 1, 1]))
    for lens in ([31, 65, 3], [32, 66, 4], [33, 0, 100]):
        batch = make_batch(lens, head_dim=16)
        for programs in (1, 2, 7):
            out = decode(batch, split=32, programs=programs, arrived=arrived)
            assert batch.error(out) < TOLERANCE[torch.float32]
            assert not arrived.any()
