"""Decode steps through static buffers and padding give the same tokens."""

import gc
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from engine import Engine, EngineConfig
from engine.attention.base import ForwardBatch
from engine.run.forward.decode_graphs import DecodeGraphs, batch_sizes
from engine.run.forward.rows import StaticRows
from engine.run.forward.warm_up import nucleus_sampling
from engine.schedule.step_batch import StepBatch
from tests.engine.graphs import ReplayedTorch, SimulatedCapture, simulate_graphs, write_rows

pytestmark = pytest.mark.long

CPU = torch.device("cpu")
BLOCK = 4


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> SimulatedCapture:
    return simulate_graphs(monkeypatch)


def decode_step(context_lens: list[int], first_block: int = 1) -> StepBatch:
    """One new token for each sequence; all numbers in it differ from those of padding."""
    lens = np.array(context_lens)
    width = -(-int(lens.max()) // BLOCK)
    tables = np.arange(len(lens) * width, dtype=np.int32).reshape(-1, width) + first_block
    return StepBatch(
        token_ids=lens + 100,
        positions=lens - 1,
        slot_mapping=lens + 200,
        sample_rows=np.arange(len(lens)),
        block_tables=tables,
        context_lens=lens,
        query_lens=np.ones_like(lens),
        slots=np.arange(len(lens)),
        generations=first_block + np.arange(len(lens)),
    )


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


class Graphs:
    """DecodeGraphs of up to 10 rows whose model doubles token ids; `ran` lists its batches' sizes."""

    def __init__(self) -> None:
        self.ran: list[int] = []
        self.capture = SimulatedCapture()
        self.graphs = DecodeGraphs(
            self._forward, lambda hidden, rows, edits, tokens: tokens.copy_(hidden.squeeze(1)),
            ReplayedTorch(CPU), self.capture, StaticRows(10, -(-200 // BLOCK), BLOCK, CPU, write_rows), 200,
        )  # fmt: skip

    def _forward(self, batch: ForwardBatch) -> torch.Tensor:
        self.ran.append(len(batch.token_ids))
        return 2.0 * batch.token_ids.unsqueeze(1)


def test_a_step_takes_the_next_larger_size() -> None:
    """And gets its own rows back, no padding. At start each graph is captured, then run once."""
    case = Graphs()
    assert case.ran == [10, 8, 4, 2, 1, 1, 2, 4, 8, 10]
    assert sorted(case.capture.replayed) == list(range(10))
    cases = ([7], 1), ([40, 40], 2), ([41, 2, 3], 4), ([101] * 5, 8), ([200] * 10, 10)
    for i, (context_lens, expected) in enumerate(cases):
        case.ran.clear()
        step = decode_step(context_lens, first_block=100 * i)
        assert case.graphs.fits(step)
        sampled = case.graphs.run(step, nucleus_sampling(len(context_lens)))
        assert sampled.token_ids[sampled.places].tolist() == (2 * step.token_ids).tolist()
        assert case.ran == [expected]


def test_a_step_of_another_kind_fits_none() -> None:
    """A longer query, more rows, a row that does not sample, and a step that is no scheduler's."""
    fits, step = Graphs().graphs.fits, decode_step([5, 6, 7])
    assert fits(step)
    assert not fits(decode_step([5] * 11))
    assert not fits(replace(step, sample_rows=step.sample_rows[:2]))
    assert not fits(replace(step, slots=step.slots[:0]))
    longer = replace(step, token_ids=np.arange(4), query_lens=np.array([1, 1, 2]))
    assert not fits(longer)


def test_closing_the_engine_frees_the_pool_that_the_graphs_read(folder: Path, capture: SimulatedCapture) -> None:
    """No cycle keeps it: a new engine can take the memory at once."""
    built = Engine(EngineConfig(str(folder), kv_cache_bytes=1 << 20, max_num_seqs=4))
    pool = weakref.ref(built._open_runner().cache)  # type: ignore[union-attr]
    gc.disable()
    try:
        built.close()
        assert pool() is None
    finally:
        gc.enable()
