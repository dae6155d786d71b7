"""Two ranks on two GPUs over NCCL: the same tokens, and a dead rank hangs nobody. Skipped with fewer GPUs."""

from __future__ import annotations

import pytest
import torch

from engine import Engine
from tests.engine.reference import Reference
from tests.engine.two_ranks import (
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
