"""Which tests are quick is read from their imports, and a guard fails those that are not."""

import multiprocessing.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.quick import ROOT, Guard, NotQuickError, loads_torch


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("tests/test_links.py", False),
        ("tests/worker/test_metrics.py", False),
        ("tests/engine/test_sampler.py", True),
        # torch is imported by a file that it imports
        ("tests/e2e/test_heads.py", True),
        # by the conftest of its folder
        ("tests/engine/test_block_manager.py", True),
    ],
)
def test_a_file_loads_torch_if_its_imports_lead_there(file: str, expected: bool) -> None:
    assert loads_torch(ROOT / file) is expected


def test_an_import_inside_a_function_or_for_types_alone_loads_nothing() -> None:
    # They import torch in such places.
    assert not loads_torch(ROOT / "engine/__init__.py")
    assert not loads_torch(ROOT / "worker/batch_worker.py")


@pytest.mark.processes
def test_the_guard_refuses_processes_and_torch_while_a_test_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # The guard replaces it; this puts it back.
    monkeypatch.setattr(multiprocessing.util, "spawnv_passfds", multiprocessing.util.spawnv_passfds)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    guard = Guard()
    assert subprocess.run([sys.executable, "-c", ""], check=True).returncode == 0
    test = guard.pytest_runtest_protocol()
    next(test)
    try:
        with pytest.raises(NotQuickError, match="starts a process"):
            subprocess.run([sys.executable, "-c", ""], check=True)
        with pytest.raises(NotQuickError, match="starts a process"):
            os.posix_spawn(sys.executable, [sys.executable], {})
        with pytest.raises(NotQuickError, match="starts a process"):
            multiprocessing.util.spawnv_passfds(sys.executable, [], [])
        with pytest.raises(NotQuickError, match="loads torch"):
            import torch  # noqa: F401
        # It fails a test that catches the error, too.
        end = guard.pytest_runtest_teardown()
        next(end)
        with pytest.raises(NotQuickError):
            next(end)
    finally:
        test.close()
    assert subprocess.run([sys.executable, "-c", ""], check=True).returncode == 0
