"""What must be settled before any test module is imported, and the Redis that tests of all packages share."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.examples import load_profile
from tests.quick import Guard, loads_torch, uses_processes

if TYPE_CHECKING:
    from redis import Redis  # a GPU machine, where tests of the engine run, need not have it


def has_gpu() -> bool:
    """Whether CUDA's driver sees a GPU. torch would say so, too, but most tests need no torch."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return False
    return count.value > 0


if not has_gpu():
    # Triton reads this when it is imported, which transformers does: our kernels then run in its interpreter.
    os.environ.setdefault("TRITON_INTERPRET", "1")

#: Seconds for a long test that says no other limit: coverage slows Triton's interpreter down to half.
LONG_TIMEOUT_S = 1800

#: The files that take longest. They go first, so that at the end short ones fill up every process.
LONGEST = (
    "tests/faults/test_faults.py",
    "tests/rq_suite/test_rq_suite.py",
    "tests/engine/test_tensor_parallel.py",
    "tests/e2e/",
    "tests/jobs/test_thaws.py",
    "tests/engine/test_kernels_",
    "tests/engine/test_histories.py",
    "tests/ops/test_gpu_bench.py",
    "tests/engine/test_families.py",
    "tests/worker/test_deaths.py",
    "tests/worker/test_rq_semantics.py",
    "tests/engine/test_parity.py",
)

#: Where tests compute. Most others wait for processes that they have started.
COMPUTING = ("tests/engine/", "tests/ops/test_gpu_bench.py")

#: What Redis has promised us: tests that run, among the long ones, with every kind of server on the machine.
REDIS_CONTRACTS = (
    "tests.doctor.test_redis_faults",
    "tests.jobs.cli.test_refused_writes",
    "tests.ops.test_redis_users",
    "tests.worker.test_claim",
    "tests.worker.test_fence",
    "tests.worker.test_ownership",
    "tests.worker.test_secure_redis",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--quick", action="store_true", help="only tests that need neither torch nor a process"
    )


def pytest_configure(config: pytest.Config) -> None:
    load_profile(is_long="not long" not in config.getoption("-m"))
    if config.getoption("--quick"):
        config.pluginmanager.register(Guard())


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """In the quick tier, pass over files that load torch, without importing them."""
    is_test = collection_path.suffix == ".py" and collection_path.name.startswith("test_")
    if config.getoption("--quick") and is_test and loads_torch(collection_path):
        return True
    return None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.module.__name__ in REDIS_CONTRACTS and "redis_executable" in metafunc.fixturenames:
        from tests.redis_server import redis_server_kinds

        first, *others = redis_server_kinds().items()
        kinds = [pytest.param(first[1], id=first[0])]
        # What a restart keeps depends on the kind of server, little else does.
        marks = () if metafunc.module.__name__ == "tests.ops.test_redis_users" else pytest.mark.long
        kinds += [pytest.param(path, id=name, marks=marks) for name, path in others]
        metafunc.parametrize("redis_executable", kinds, scope="session")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Choose the quick tests, if they are asked for, and put files into the order in which they run.

    Files that compute and files that wait take turns, the longest of either first: then neither is a core idle nor
    do all processes compute at once.
    """
    for item in items:
        if item.get_closest_marker("long") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(LONG_TIMEOUT_S))
    if config.getoption("--quick"):
        left_out = [item for item in items if uses_processes(item)]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]
    found = dict.fromkeys(_file(item) for item in items)
    places: dict[str, tuple[float, bool]] = {}
    for computes in (False, True):
        files = [file for file in found if file.startswith(COMPUTING) == computes]
        files.sort(
            key=lambda file: next(
                (i for i, name in enumerate(LONGEST) if file.startswith(name)), 99
            )
        )
        places |= {file: (i / len(files), computes) for i, file in enumerate(files)}
    items.sort(key=lambda item: places[_file(item)])


def _file(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


@pytest.fixture(scope="session")
def redis_executable() -> str:
    from tests.redis_server import redis_server_executable

    return redis_server_executable()


@pytest.fixture(scope="session")
def redis_url(redis_executable: str) -> Iterator[str]:
    """A server for all tests that run in this process."""
    from tests.redis_server import running_redis_server

    with running_redis_server(executable=redis_executable) as url:
        yield url


@pytest.fixture
def redis(redis_url: str) -> Iterator[Redis]:
    """That server, empty."""
    from redis import Redis

    with Redis.from_url(redis_url) as client:
        client.flushall()
        yield client
