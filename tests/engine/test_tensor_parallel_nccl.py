"""Two ranks on two GPUs over NCCL: the same tokens, and a dead rank hangs nobody. Skipped with fewer GPUs."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest
import torch

from engine import Engine, RankFailed, SamplingParams
from tests.engine.reference import Reference
from tests.engine.two_ranks import (
    GREEDY,
    SHAPE_OF,
    check_nothing_is_left,
    compare,
    config,
    ranks_of,
)

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.mark.parametrize("name", ["gqa1_untied", "gqa2_tied_hub", "gqa4_tied"])
def test_tokens_equal_transformers(name: str, references: dict[str, Reference]) -> None:
    """Four, two and one KV head; the torch backend, whose float32 is the reference's."""
    reference = references[name]
    on_gpu = config(reference.folder, SHAPE_OF[name], device="cuda", attention_backend="torch")
    with Engine(on_gpu) as built:
        compare(reference, built)
        pids, port = ranks_of(built).pids, ranks_of(built)._store.port  # type: ignore[union-attr]
    check_nothing_is_left(pids, port)


def test_a_killed_rank_is_named_within_seconds_and_frees_both_gpus(folder: Path) -> None:
    """NCCL's kernels wait for ever for a peer that is gone: the driver ends the rank that waits.

    The pool is what the warm-up leaves, so that memory which is not given back would show.
    """
    free_before = [torch.cuda.mem_get_info(i)[0] for i in range(2)]
    on_gpu = config(folder, SHAPE_OF["gqa2_tied_hub"], device="cuda", kv_cache_bytes=None)
    with Engine(on_gpu) as built:
        pids, port = ranks_of(built).pids, ranks_of(built)._store.port  # type: ignore[union-attr]
        built.generate([[5, 6, 7]], SamplingParams(max_tokens=3))
        built.add("a", [5, 6, 7], GREEDY)
        built.step()
        psutil.Process(pids[1]).kill()
        killed_at = time.monotonic()
        with pytest.raises(RankFailed, match="rank 1 failed: it was killed by SIGKILL"):
            built.step()
        assert time.monotonic() - killed_at < 10
    check_nothing_is_left(pids, port)
    for i in range(2):
        assert torch.cuda.mem_get_info(i)[0] > free_before[i] - 2**30
