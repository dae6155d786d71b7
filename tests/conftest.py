"""What must be settled before any test module is imported."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

# The same cases in every run, and no verdict by the clock: a busy machine is slow.
settings.register_profile(
    "tokenmill", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("tokenmill")

if not torch.cuda.is_available():
    # Triton reads this when it is imported, which transformers does: our kernels then run in its interpreter.
    os.environ.setdefault("TRITON_INTERPRET", "1")

#: The files that take longest. They go first, so that at the end short ones fill up every process.
LONGEST = (
    "tests/faults/test_faults.py",
    "tests/thaws/test_thaws.py",
    "tests/rq_suite/test_rq_suite.py",
    "tests/engine/test_triton_parity.py",
    "tests/engine/test_tensor_parallel.py",
    "tests/engine/test_families.py",
    "tests/engine/test_rank_",
    "tests/e2e/",
    "tests/ops/test_gpu_bench.py",
    "tests/worker/test_deaths.py",
    "tests/worker/test_rate_limits.py",
    "tests/engine/test_parity.py",
    "tests/engine/test_kernels_",
    "tests/worker/",
    "tests/faults/",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests of LONGEST first, each file's in their own order."""
    items.sort(
        key=lambda item: next((i for i, name in enumerate(LONGEST) if item.nodeid.startswith(name)), 99)
    )
