"""What a worker makes of its surroundings before it serves: its imports, its allocators, its threads."""

import gc
import importlib.util
import os
import platform
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest

from tests import rq_workers
from tests.rq_workers import ROOT, Workers
from tests.worker.fake_engine import FakeEngineWorker
from worker.settings import WorkerSettings
from worker.start import spin_briefly
from worker.threads.functions import FunctionPool

pytestmark = pytest.mark.usefixtures("new_interpreters")

F = "tests.worker.functions."
VARIABLES = (
    "ARROW_DEFAULT_MEMORY_POOL",
    "MALLOC_ARENA_MAX",
    "MALLOC_MMAP_THRESHOLD_",
    "OMP_WAIT_POLICY",
    "GOMP_SPINCOUNT",
)
OUTPUT = "a_module_that_nobody_has"
SCRIPT, MODULE = (f"{Path(sys.executable).parent}/rq",), (sys.executable, "-m", "rq.cli")


@pytest.fixture(autouse=True)
def told_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers inherit the environment of the tests."""
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no arenas")
@pytest.mark.parametrize(
    ("told", "malloc"),
    [
        ({}, {"arenas": 1, "mapped": 1}),
        pytest.param(
            {"MALLOC_ARENA_MAX": "2", "MALLOC_MMAP_THRESHOLD_": str(1 << 24)},
            {"arenas": 2, "mapped": 0},
            marks=pytest.mark.long,
        ),
    ],
    ids=["ours", "the operator's"],
)
def test_memory_stays_flat_and_threads_spin_briefly_unless_the_operator_says_otherwise(
    workers: Workers, told: dict[str, str], malloc: dict[str, int]
) -> None:
    """Threads share one arena, large blocks leave no gaps in it, and Arrow takes its memory from there."""
    names = ("arrow_allocator", "glibc_malloc", "spin_count")
    jobs = [workers.queue("bulk").enqueue(F + name) for name in names]
    workers.burst(**told)
    assert [workers.result(job).return_value for job in jobs] == ["system", malloc, "10000"]


def test_what_an_operator_says_of_openmp_stays() -> None:
    for told in ({"OMP_WAIT_POLICY": "ACTIVE"}, {"GOMP_SPINCOUNT": "7"}):
        environment = dict(told)
        spin_briefly(environment)
        assert environment == told


def test_a_failed_call_lets_go_of_what_it_used_without_the_collector() -> None:
    """A shard that could not be read has all its texts in its frames."""
    used: list[weakref.ref[set[str]]] = []

    def fail() -> None:
        texts = {"a row"}
        used.append(weakref.ref(texts))
        raise ValueError

    ended = threading.Event()
    pool = FunctionPool(1, "test")
    gc.disable()
    try:
        pool.submit(fail, lambda value, error: ended.set())
        assert ended.wait(10)
        pool.close(10)
        assert used[0]() is None
    finally:
        gc.enable()


class LookingWorker(FakeEngineWorker):
    """Looks for OUTPUT as an optional module, as libraries do when they are loaded, and tells a file."""

    def load_engine(self, settings: WorkerSettings) -> Any:
        found = importlib.util.find_spec(OUTPUT)
        Path(os.environ["FOUND"]).write_text(f"{found is not None}")
        return super().load_engine(settings)


@pytest.mark.parametrize(
    ("rq", "arguments", "found"),
    [
        (SCRIPT, [], "False"),
        pytest.param(MODULE, [], "False", marks=pytest.mark.long),
        pytest.param(SCRIPT, ["--path", "."], "True", marks=pytest.mark.long),
    ],
    ids=["rq", "python -m rq.cli", "--path ."],
)
def test_an_output_folder_named_like_a_module_is_none_unless_its_place_is_named(
    workers: Workers,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rq: tuple[str, ...],
    arguments: list[str],
    found: str,
) -> None:
    monkeypatch.setattr(rq_workers, "RQ", rq)
    (tmp_path / OUTPUT).mkdir()
    (tmp_path / OUTPUT / "part-00000.parquet").touch()
    places = {"FOUND": str(tmp_path / "found"), "PYTHONPATH": str(ROOT)}
    looking = f"{__name__}.{LookingWorker.__name__}"
    workers.burst(*arguments, worker_class=looking, cwd=tmp_path, **places)
    assert (tmp_path / "found").read_text() == found


@pytest.mark.long
def test_functions_in_the_working_directory_run_with_path_and_are_named_without(
    workers: Workers, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text("def clean(text):\n    return text.strip()\n")
    refused = workers.start("--burst", TOKENMILL_ALLOWED_FUNCTIONS="mine.clean")
    assert refused.wait(timeout=60) == 1
    assert "--path ." in workers.log(refused)
    job = workers.queue("bulk").enqueue("mine.clean", " a ")
    workers.burst("--path", ".", TOKENMILL_ALLOWED_FUNCTIONS="mine.clean")
    assert workers.result(job).return_value == "a"
