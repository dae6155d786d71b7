"""Fixtures of the engine's tests: random checkpoints, made once, and engines over them."""

import os
import re
from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers.utils import logging as transformers_logging

from engine.errors import ConfigError
from engine.tensor_parallel import rank_group
from tests.engine.architectures import ArchitectureRuns, Architectures
from tests.engine.checkpoints import SHAPES, make_checkpoint, shard, write_as_the_hub_does
from tests.engine.interpreter import patch_language_once_a_launch
from tests.engine.reference import Reference

ON_GPU = torch.cuda.is_available()
#: Where a GPU is, batches lie there, and these give them to a CPU's kernels, or to a library's stand-in.
collect_ignore = (
    ["test_cpu_backend.py", "test_shared_prefix.py", "test_flash_attn_backend.py"] if ON_GPU else []
)
#: What an engine says of what another machine is needed for than one with a single GPU.
OTHER_MACHINE = re.compile("does not run on device='cuda'|needs device='cpu'|needs 2 GPUs")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Iterator[None]:
    """On a GPU the tests of a CPU's ways, and of two GPUs', are skipped."""
    try:
        return (yield)
    except ConfigError as error:
        if ON_GPU and (found := OTHER_MACHINE.search(str(error))):
            pytest.skip(found[0])
        raise


pytest_runtest_call = pytest_runtest_setup


@pytest.fixture(scope="session", autouse=True)
def _share_of_the_gpu() -> Iterator[None]:
    """Processes of tests divide a GPU: an engine that takes what is free would leave the others nothing."""
    measure, processes = (
        torch.cuda.mem_get_info,
        int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")),
    )

    def share(device: torch.device | None = None) -> tuple[int, int]:
        free, total = measure(device)
        return min(free, total // processes), total // processes

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "mem_get_info", share)
        yield


@pytest.fixture(scope="session", autouse=True)
def _quiet_single_thread() -> Iterator[None]:
    """Tiny matrices run faster on one thread, and transformers' progress bars say nothing here."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="session", autouse=True)
def _quick_interpreter() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton"):
            patch_language_once_a_launch(patch)
        yield


@pytest.fixture(scope="module")
def forked_ranks() -> Iterator[None]:
    """Ranks that start without an interpreter of their own, where no GPU is."""
    from tests.engine.forked_ranks import ForkedRank

    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available():
            patch.setattr(rank_group, "RankProcess", ForkedRank)
        yield


@pytest.fixture(scope="session")
def folders(
    tmp_path_factory: pytest.TempPathFactory, _quiet_single_thread: None
) -> dict[str, Path]:
    """One checkpoint folder for each shape, by name; one as the hub writes it, one in shards."""
    root = tmp_path_factory.mktemp("checkpoints")
    made = {shape.name: make_checkpoint(root / shape.name, shape) for shape in SHAPES}
    write_as_the_hub_does(made["gqa2_tied_hub"])
    shard(made["gqa2_sharded"])
    return made


@pytest.fixture(scope="session")
def references(folders: dict[str, Path]) -> dict[str, Reference]:
    """transformers' answers for each checkpoint, computed when first asked for."""
    return {name: Reference(folder) for name, folder in folders.items()}


@pytest.fixture(scope="module")
def truth(references: dict[str, Reference]) -> Callable[[tuple[int, ...]], torch.Tensor]:
    """Log probabilities [tokens, vocabulary] of what follows each token, by transformers alone."""

    @cache
    def compute(token_ids: tuple[int, ...]) -> torch.Tensor:
        with torch.inference_mode():
            logits = (
                references["gqa2_tied_hub"]
                .model(torch.tensor([token_ids]), use_cache=False)
                .logits[0]
            )
        return logits.float().log_softmax(-1)

    return compute


@pytest.fixture
def folder(folders: dict[str, Path]) -> Path:
    """A checkpoint for tests that need just any model."""
    return folders["gqa2_tied_hub"]


@pytest.fixture(scope="session")
def architecture(
    tmp_path_factory: pytest.TempPathFactory, _quiet_single_thread: None
) -> Architectures:
    """An architecture's checkpoint and reference, made when it is first asked for."""
    made: dict[str, ArchitectureRuns] = {}

    def find(name: str) -> ArchitectureRuns:
        if name not in made:
            made[name] = ArchitectureRuns(tmp_path_factory.mktemp(name), name)
        return made[name]

    return find


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Whatever the tests run with."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
