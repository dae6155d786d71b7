"""A model of transformers over several ranks, split by its own plan."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import engine.models.transformers_model
from engine import UnsupportedModel
from engine.checkpoint.model_config import read_model_config
from engine.layers.parallel import TensorParallel
from engine.run.forward.model_runner import ModelRunner
from engine.run.forward.warm_up import make_step
from tests.engine.architectures import Architectures, small

pytestmark = pytest.mark.long


@dataclass
class Exchange:
    """Where the ranks of one process meet."""

    barrier: threading.Barrier
    parts: dict[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class ThreadParallel(TensorParallel):
    """A rank that is a thread."""

    exchange: Exchange = field(kw_only=True)

    def _meet(self, part: Tensor) -> list[Tensor]:
        self.exchange.parts[self.rank] = part
        self.exchange.barrier.wait(60)
        parts = [self.exchange.parts[rank] for rank in range(self.size)]
        self.exchange.barrier.wait(60)
        return parts

    def all_reduce(self, partial: Tensor) -> Tensor:
        return torch.stack(self._meet(partial.clone())).sum(0)

    def gather(self, part: Tensor) -> Tensor:
        parts = self._meet(part)
        return torch.cat(parts, -1) if self.rank == 0 else part

    def minimum(self, value: int) -> int:
        return int(torch.stack(self._meet(torch.tensor(value))).min())


@pytest.mark.parametrize("name", ["llama", "glm", "olmo2", "gemma2"])
def test_two_ranks_compute_what_one_does(
    name: str, architecture: Architectures, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Split by transformers' own plans: columns, rows, and both with the whole on each rank between."""
    folder = architecture(name).reference.folder
    read, lock = engine.models.transformers_model._read, threading.Lock()

    def read_alone(*args: Any) -> Any:
        with lock:  # transformers' loader changes globals
            return read(*args)

    monkeypatch.setattr(engine.models.transformers_model, "_read", read_alone)
    step = make_step([20, 3, 1], [20, 3, 1], 16, 4)
    step.token_ids[:] = range(5, 29)
    found: dict[int, Tensor] = {}
    weights: dict[int, int] = {}

    def compute(tp: TensorParallel) -> None:
        runner = ModelRunner(small(folder, model_path="transformers"), read_model_config(folder), folder, tp)
        found[tp.rank] = runner.logits(step)
        weights[tp.rank] = sum(parameter.numel() for parameter in runner.model.parameters())

    compute(TensorParallel())
    expected, whole = found[0], weights[0]
    exchange = Exchange(threading.Barrier(2))
    threads = [
        threading.Thread(target=compute, args=(ThreadParallel(rank, 2, exchange=exchange),))
        for rank in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.testing.assert_close(found[0], expected, rtol=1e-4, atol=1e-4)
    assert max(weights.values()) < whole * 0.65


@pytest.mark.usefixtures("forked_ranks")
def test_ranks_share_a_model_over_gloo(architecture: Architectures) -> None:
    assert architecture("glm").run("tp2")[0] == []


@pytest.mark.parametrize(
    ("name", "message"), [("gpt2", "no plan for splitting GPT2"), ("qwen2_moe", "moe_tp")]
)
def test_a_split_that_is_not_built_is_refused(name: str, message: str, architecture: Architectures) -> None:
    folder = architecture(name).reference.folder
    config = small(folder, model_path="transformers")
    with pytest.raises(
        UnsupportedModel, match=rf"tensor_parallel_size=2: .*{message}.* set tensor_parallel_s"
    ):
        ModelRunner(config, read_model_config(folder), folder, TensorParallel(0, 2))
