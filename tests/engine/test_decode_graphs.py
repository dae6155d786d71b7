"""Sizes of the graphs, and their end; test_determinism.py holds what is computed through them."""

import gc
import weakref
from pathlib import Path

import pytest

from engine import Engine, EngineConfig
from engine.run.forward.decode_graphs import batch_sizes
from tests.engine.graphs import SimulatedCapture, simulate_graphs

pytestmark = pytest.mark.long


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> SimulatedCapture:
    return simulate_graphs(monkeypatch)


def test_ladder_of_sizes_is_dense_enough_and_ends_at_the_largest_batch() -> None:
    """Each number of sequences has a graph; padding is below an eighth of the rows from 64 on."""
    for max_num_seqs in (1, 2, 3, 7, 8, 9, 100, 256, 300, 1024):
        sizes = batch_sizes(max_num_seqs)
        assert sizes == sorted(set(sizes))
        assert sizes[-1] == max_num_seqs
        for n in range(64, max_num_seqs + 1):
            size = next(size for size in sizes if size >= n)
            assert size - n < n / 8
    assert len(batch_sizes(256)) < 30


def test_closing_the_engine_frees_the_pool_that_the_graphs_read(
    folder: Path, capture: SimulatedCapture
) -> None:
    """No cycle keeps it: a new engine can take the memory at once."""
    built = Engine(EngineConfig(str(folder), kv_cache_bytes=1 << 20, max_num_seqs=4))
    pool = weakref.ref(built._open_runner().cache)  # type: ignore[union-attr]
    gc.disable()
    try:
        built.close()
        assert pool() is None
    finally:
        gc.enable()
