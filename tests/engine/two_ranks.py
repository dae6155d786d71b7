"""Engines of two ranks for tests, and what may be left of them."""

import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine import Engine, EngineConfig, EngineStats, SamplingParams
from engine.tensor_parallel.rank_group import RankGroup
from tests.engine.checkpoints import SHAPES, Shape, pool_bytes
from tests.engine.reference import NUM_NEW_TOKENS, Reference

GREEDY = SamplingParams(max_tokens=NUM_NEW_TOKENS, temperature=0.0, ignore_eos=True)
SHAPE_OF = {shape.name: shape for shape in SHAPES}


def config(folder: Path, shape: Shape, *, pool_blocks: int = 600, **changes: Any) -> EngineConfig:
    """Two ranks in float32, each with pool_blocks blocks of its own KV heads."""
    per_rank = replace(shape, num_kv_heads=max(1, shape.num_kv_heads // 2))
    values: dict[str, Any] = {
        "dtype": "float32", "max_model_len": 200, "max_num_seqs": 32, "max_num_batched_tokens": 2048,
        "kv_cache_bytes": pool_bytes(per_rank, pool_blocks), "tensor_parallel_size": 2,
    }  # fmt: skip
    return EngineConfig(str(folder), **{**values, **changes})


def ranks_of(built: Engine) -> RankGroup:
    runner = built._open_runner()
    assert isinstance(runner, RankGroup)
    return runner


def wait_until(condition: Callable[[], object], timeout_s: float = 10) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)  # a process's state announces nothing


def check_nothing_is_left(pids: list[int], port: int) -> None:
    assert [pid for pid in pids if psutil.pid_exists(pid)] == []
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)


def compare(reference: Reference, built: Engine) -> EngineStats:
    """Every token equals transformers', save ties; no block is lost."""
    assert reference.unexplained(built.generate(reference.prompts, GREEDY)) == []
    stats = built.stats()
    assert stats.free_blocks == stats.num_blocks
    return stats
