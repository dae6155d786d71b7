"""What must be settled before any test module is imported, and the Redis that tests of all packages share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from redis import Redis  # a GPU machine, where tests of the engine run, need not have it

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


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    """A server for all tests that run in this process."""
    from tests.redis_server import running_redis_server

    with running_redis_server() as url:
        yield url


@pytest.fixture
def redis(redis_url: str) -> Iterator[Redis]:
    """That server, empty."""
    from redis import Redis

    with Redis.from_url(redis_url) as client:
        client.flushall()
        yield client
