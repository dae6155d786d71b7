"""Decode steps through static buffers and padding give the same tokens, and each fault of them shows."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import Engine, EngineConfig, StepFailed
from engine.attention.forward_batch import ForwardBatch
from engine.attention.torch_backend import TorchBackend
from engine.run.decode_graphs import CudaCapture, DecodeGraphs, StaticInputs, batch_sizes
from engine.run.model_runner import choose_capture
from engine.schedule.step_batch import StepBatch
from tests.engine import test_determinism as determinism
from tests.engine import test_parity as parity
from tests.engine.checkpoints import SHAPES
from tests.engine.graphs import ReplayedTorch, SimulatedCapture, simulate_graphs
from tests.engine.reference import Reference

CPU = torch.device("cpu")
BLOCK = 4
FAULTY_SHAPE = next(shape for shape in SHAPES if shape.name == "gqa4_tied")


@pytest.fixture(scope="module")
def few(folders: dict[str, Path]) -> dict[str, Reference]:
    """References with every third prompt."""
    made = {name: Reference(folders[name]) for name in parity.BY_NAME}
    for reference in made.values():
        reference.prompts = reference.prompts[2::3]
    return made


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
    )


# The same tokens


@pytest.mark.parametrize("name", parity.BY_NAME)
def test_greedy_tokens_equal_transformers(
    name: str, few: dict[str, Reference], capture: SimulatedCapture
) -> None:
    """Every checkpoint; sequences are preempted and recomputed, so that batches of many sizes occur.

    With some, steps overlap: their token ids come from the step before, into the static buffer.
    """
    settings: dict[str, Any] = {"pool_blocks": 14, "max_num_batched_tokens": 33, "max_num_seqs": 11}
    settings["async_scheduling"] = name in ("gqa2_bias", "gqa4_tied")
    differences, stats = parity.generate(few[name], parity.BY_NAME[name], settings)
    assert differences == []
    assert stats.num_preemptions > 0
    assert len(capture.replayed) > stats.num_steps / 3
    assert len(set(capture.replayed)) >= 3


def test_seeded_tokens_do_not_depend_on_the_batch(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One at a time without graphs; together with them, also preempted."""
    requests = determinism.requests()[:10]
    expected, _ = determinism.run(determinism.config(folders, max_num_seqs=1), requests)
    capture = simulate_graphs(monkeypatch)
    for changes in (
        {"max_num_seqs": 24, "async_scheduling": True},
        {"pool_blocks": 7, "max_num_seqs": 13, "max_num_batched_tokens": 37},
    ):
        capture.replayed.clear()
        completions, stats = determinism.run(determinism.config(folders, **changes), requests)
        assert completions == expected
        assert (stats.num_preemptions > 0) == ("pool_blocks" in changes)
        assert len(capture.replayed) > stats.num_steps / 3


# Faults that the same comparison catches


def differences(reference: Reference) -> list[str]:
    """Three sequences in graphs of four rows: the first one holds slot 0 to its end."""
    three = copy(reference)
    three.prompts, three.answers = reference.prompts[:3], reference.answers[:3]
    return parity.generate(three, FAULTY_SHAPE, {"max_num_seqs": 4})[0]


def write_padding_to_slot_0(inputs: StaticInputs, step: StepBatch) -> None:
    inputs.slot_mapping.masked_fill_(inputs.slot_mapping < 0, 0)


def leave_stale_tables(inputs: StaticInputs, step: StepBatch) -> None:
    inputs.block_tables.copy_(inputs.before["block_tables"])  # type: ignore[attr-defined]


def leave_stale_context_lens(inputs: StaticInputs, step: StepBatch) -> None:
    inputs.context_lens.copy_(inputs.before["context_lens"])  # type: ignore[attr-defined]


def leave_stale_slots(inputs: StaticInputs, step: StepBatch) -> None:
    inputs.slot_mapping.copy_(inputs.before["slot_mapping"])  # type: ignore[attr-defined]


def leave_stale_positions(inputs: StaticInputs, step: StepBatch) -> None:
    inputs.positions.copy_(inputs.before["positions"])  # type: ignore[attr-defined]


FAULTS = [
    write_padding_to_slot_0, leave_stale_tables, leave_stale_context_lens, leave_stale_slots,
    leave_stale_positions,
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_buffer_is_caught(
    fault: Callable[[StaticInputs, StepBatch], None],
    few: dict[str, Reference],
    capture: SimulatedCapture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Padding that writes to slot 0; a buffer that keeps what the step before left there."""
    fill = StaticInputs.fill

    def fill_wrongly(inputs: Any, step: StepBatch) -> None:
        names = ("block_tables", "context_lens", "slot_mapping", "positions")
        inputs.before = {name: getattr(inputs, name).clone() for name in names}
        fill(inputs, step)
        fault(inputs, step)

    assert differences(few[FAULTY_SHAPE.name]) == []
    monkeypatch.setattr(StaticInputs, "fill", fill_wrongly)
    assert differences(few[FAULTY_SHAPE.name])


def test_logits_of_padding_are_caught(
    few: dict[str, Reference], capture: SimulatedCapture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padding that goes on to the sampler: more tokens than sequences."""
    run = DecodeGraphs.run

    def run_and_keep_padding(graphs: Any, step: StepBatch, sampled: torch.Tensor | None) -> torch.Tensor:
        run(graphs, step, sampled)
        hidden: torch.Tensor = graphs._hidden
        assert len(hidden) > len(step.query_lens)
        object.__setattr__(step, "sample_rows", np.arange(len(hidden)))
        return hidden

    monkeypatch.setattr(DecodeGraphs, "run", run_and_keep_padding)
    with pytest.raises(StepFailed, match="did not match"):
        differences(few[FAULTY_SHAPE.name])


# The parts


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(1, 6 * BLOCK), min_size=1, max_size=11), min_size=1, max_size=4))
def test_buffers_hold_the_last_step_and_padding(steps: list[list[int]]) -> None:
    """Whatever was in them before: a shorter step after a longer one leaves none of its rows."""
    inputs = StaticInputs(11, 6, CPU)
    for i, context_lens in enumerate(steps):
        step, n = decode_step(context_lens, first_block=100 * i), len(context_lens)
        inputs.fill(step)
        assert inputs.token_ids[:n].tolist() == step.token_ids.tolist()
        assert inputs.positions[:n].tolist() == step.positions.tolist()
        assert inputs.slot_mapping.tolist() == step.slot_mapping.tolist() + [-1] * (11 - n)
        assert inputs.context_lens.tolist() == context_lens + [0] * (11 - n)
        assert (inputs.token_ids[n:] == 0).all()
        assert (inputs.positions[n:] == 0).all()
        assert inputs.block_tables[:n, : step.block_tables.shape[1]].tolist() == step.block_tables.tolist()


def test_every_buffer_starts_at_16_bytes() -> None:
    """Triton compiles a kernel anew for pointers that do not: in the middle of a capture."""
    for max_num_seqs in (1, 2, 3, 5, 255, 257):
        inputs = StaticInputs(max_num_seqs, 3, CPU)
        buffers = (
            inputs.token_ids, inputs.positions, inputs.slot_mapping, inputs.context_lens, inputs.rows,
            inputs.block_tables,
        )  # fmt: skip
        assert [buffer.data_ptr() % 16 for buffer in buffers] == [0] * 6


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
        self.graphs = DecodeGraphs(
            self._forward, ReplayedTorch(CPU), SimulatedCapture(), max_num_seqs=10, max_model_len=200,
            block_size=BLOCK, hidden_size=1, dtype=torch.float32, device=CPU,
        )  # fmt: skip

    def _forward(self, batch: ForwardBatch) -> torch.Tensor:
        self.ran.append(len(batch.token_ids))
        return 2.0 * batch.token_ids.unsqueeze(1)


def test_a_step_takes_the_next_larger_size() -> None:
    """And gets its own rows back, no padding."""
    case = Graphs()
    assert case.ran == [10, 8, 4, 2, 1]
    for context_lens, expected in (
        ([7], 1), ([40, 40], 2), ([41, 2, 3], 4), ([101] * 5, 8), ([200] * 10, 10)
    ):  # fmt: skip
        case.ran.clear()
        step = decode_step(context_lens)
        assert case.graphs.fits(step)
        assert case.graphs.run(step).squeeze(1).tolist() == (2 * step.token_ids).tolist()
        assert case.ran == [expected]


def test_a_step_with_a_longer_query_or_more_rows_fits_none() -> None:
    case = Graphs()
    step = decode_step([5, 6])
    mixed = replace(step, token_ids=np.append(step.token_ids, 1), query_lens=np.array([1, 2]))
    assert not case.graphs.fits(mixed)
    assert not case.graphs.fits(decode_step([5] * 11))


def test_cpu_eager_and_a_backend_that_cannot_be_recorded_have_no_graphs() -> None:
    """CUDA's own capture is not made for any of them."""
    cuda, capturable = torch.device("cuda"), ReplayedTorch(CPU)
    assert choose_capture(EngineConfig("m"), capturable, CPU) is None
    assert choose_capture(EngineConfig("m", enforce_eager=True), capturable, cuda) is None
    assert choose_capture(EngineConfig("m"), TorchBackend(CPU), cuda) is None


def test_capture_on_cuda_runs_once_before_it_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the stream that records, in one memory pool for all graphs, and without minding other threads."""
    events: list[Any] = []

    class Stream:
        device = "cuda:0"

        def __init__(self, device: object = None) -> None:
            pass

        def wait_stream(self, other: object) -> None:
            events.append("wait")

    class Graph:
        def replay(self) -> None:
            events.append("replay")

    @contextmanager
    def on_stream(stream: Stream) -> Iterator[None]:
        events.append("stream")
        yield
        events.append("end")

    @contextmanager
    def record(graph: Graph, *, pool: Any, stream: Stream, capture_error_mode: str) -> Iterator[None]:
        events.append(("record", pool, capture_error_mode))
        yield
        events.append("end")

    for name, value in {
        "Stream": Stream, "CUDAGraph": Graph, "stream": on_stream, "graph": record,
        "current_stream": lambda device: None, "graph_pool_handle": lambda: "pool",
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    capture = CudaCapture(torch.device("cuda"))
    replay = capture(lambda: events.append("run"))
    once = ["wait", "stream", "run", "end", ("record", "pool", "thread_local"), "run", "end"]
    assert events == once
    replay()
    assert events == [*once, "replay"]


def test_capturing_leaves_the_pool_as_it_was(
    folder: Path, capture: SimulatedCapture, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing but padding is computed; the graphs are logged."""
    limits = EngineConfig(str(folder), kv_cache_bytes=1 << 20, max_num_seqs=4)
    with caplog.at_level("INFO", logger="engine"), Engine(limits) as built:
        assert capture.num_captured == 3
        assert (built._open_runner().cache.pool == 0).all()  # type: ignore[union-attr]
    assert "3 CUDA graphs" in caplog.text


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
