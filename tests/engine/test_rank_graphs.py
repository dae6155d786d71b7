"""Ranks replay their steps from graphs all together or not at all, and exchange no more logits than are read."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from torch import Tensor

from engine import Engine
from engine.checkpoint.model_config import read_model_config
from engine.errors import CaptureFailed
from engine.layers.parallel import TensorParallel
from engine.run.forward.decode_graphs import capture_on_all_ranks
from engine.run.forward.model_runner import ModelRunner
from engine.run.forward.warm_up import make_step, nucleus_sampling
from engine.tensor_parallel import rank_group
from engine.tensor_parallel.rank_group import RankGroup
from tests.engine.forked_ranks import (
    LOG,
    ForkedRank,
    RankWithoutDecodeGraphs,
    RankWithoutMixedGraphs,
    RecordingRank,
)
from tests.engine.reference import Reference
from tests.engine.two_ranks import SHAPE_OF, compare, config, ranks_of

pytestmark = pytest.mark.long

NAME = "gqa2_tied_hub"
NO_DECODE_GRAPHS = (
    "decode steps run without CUDA graphs, as this model's cannot be recorded: "
    "another rank cannot record them\n"
)
NO_MIXED_GRAPHS = "steps with prompts run without CUDA graphs: another rank cannot record them\n"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("rank_class", "has_graphs", "logged"),
    [
        (RecordingRank, True, ""),
        (RankWithoutDecodeGraphs, False, NO_DECODE_GRAPHS),
        (RankWithoutMixedGraphs, True, NO_MIXED_GRAPHS),
    ],
)
def test_ranks_go_on_without_graphs_that_one_of_them_cannot_record(
    rank_class: type[ForkedRank],
    has_graphs: bool,
    logged: str,
    references: dict[str, Reference],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The start neither ends nor hangs, rank 0 logs what is left out, and the tokens are transformers'."""
    log = tmp_path / "rank0.log"
    monkeypatch.setenv(LOG, str(log))
    monkeypatch.setattr(rank_group, "RankProcess", rank_class)
    monkeypatch.setitem(RankGroup.__init__.__kwdefaults__, "start_timeout_s", 120.0)
    reference = references[NAME]
    few = {"max_num_seqs": 8, "max_num_batched_tokens": 192}  # of which three sizes are recorded

    with Engine(config(reference.folder, SHAPE_OF[NAME], **few)) as engine:
        assert ranks_of(engine).has_graphs == has_graphs
        compare(reference, engine)

    assert log.read_text() == logged


@dataclass(frozen=True)
class AskingParallel(TensorParallel):
    """One of two ranks, of which the other one can record. asked: what this rank said of each capture."""

    asked: list[int] = field(default_factory=list)

    def minimum(self, value: int) -> int:
        self.asked.append(value)
        return value


@pytest.mark.parametrize(
    ("failing_run", "error", "asked"), [(1, RuntimeError, []), (2, CaptureFailed, [0])]
)
def test_a_rank_ends_whose_step_fails_while_others_wait_in_its_sums(
    failing_run: int, error: type[Exception], asked: list[int]
) -> None:
    """Where the step fails as it is run to set up, the rank asks nobody; where it fails as it is recorded, it does."""
    tp = AskingParallel(rank=1, size=2)
    num_runs = 0

    def run() -> None:
        nonlocal num_runs
        num_runs += 1
        if num_runs == failing_run:
            raise RuntimeError("CUBLAS_STATUS_ALLOC_FAILED")

    def capture(step: Callable[[], None]) -> str:
        step()
        step()
        return "a graph"

    with pytest.raises(error, match="CUBLAS_STATUS_ALLOC_FAILED"):
        capture_on_all_ranks(capture, tp)(run)
    assert tp.asked == asked


@dataclass(frozen=True)
class CountingParallel(TensorParallel):
    """A rank alone that counts the rows it gathers. gathered: of each call."""

    gathered: list[int] = field(default_factory=list)

    def gather(self, part: Tensor) -> Tensor:
        self.gathered.append(len(part))
        return part


def test_ranks_gather_the_logits_of_rows_that_sample_and_of_no_others(folder: Path) -> None:
    """Two prompts of 40 and 7 tokens beside a decode."""
    tp = CountingParallel()
    alone = config(folder, SHAPE_OF[NAME], tensor_parallel_size=1)
    runner = ModelRunner(alone, read_model_config(folder), folder, tp)
    tp.gathered.clear()

    runner.launch(make_step([40, 1, 7], [40, 30, 20], 16, 10), nucleus_sampling(3)).wait()

    assert tp.gathered == [3]
