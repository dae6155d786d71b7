"""A worker imports nothing from its working directory, where jobs write their output, unless told to."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

from tests import rq_workers
from tests.rq_workers import ROOT, Workers
from tests.worker.fake_engine import FakeEngine, FakeEngineWorker
from worker.settings import WorkerSettings

pytestmark = pytest.mark.usefixtures("new_interpreters")

OUTPUT = "a_module_that_nobody_has"
SCRIPT, MODULE = (f"{Path(sys.executable).parent}/rq",), (sys.executable, "-m", "rq.cli")


class LookingWorker(FakeEngineWorker):
    """Looks for OUTPUT as an optional module, as libraries do when they are loaded, and tells a file."""

    def load_engine(self, settings: WorkerSettings) -> FakeEngine:
        found = importlib.util.find_spec(OUTPUT)
        Path(os.environ["FOUND"]).write_text(f"{found is not None}")
        return super().load_engine(settings)


def looked(
    workers: Workers, folder: Path, *arguments: str, python_path: str = str(ROOT), command: str = "worker"
) -> str:
    """Start a worker beside an output folder named like a module; return whether it can be imported."""
    (folder / OUTPUT).mkdir(exist_ok=True)
    (folder / OUTPUT / "part-00000.parquet").touch()
    workers.burst(
        *arguments,
        command=command,
        worker_class=f"{__name__}.{LookingWorker.__name__}",
        cwd=folder,
        FOUND=str(folder / "found"),
        PYTHONPATH=python_path,
    )
    return (folder / "found").read_text()


@pytest.mark.parametrize("rq", [SCRIPT, MODULE], ids=["rq", "python -m rq.cli"])
@pytest.mark.parametrize("command", ["worker", "worker-pool"])
def test_an_output_folder_named_like_a_module_is_none(
    workers: Workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rq: tuple[str, ...], command: str
) -> None:
    monkeypatch.setattr(rq_workers, "RQ", rq)
    arguments = ("--num-workers", "1") if command == "worker-pool" else ()
    assert looked(workers, tmp_path, *arguments, command=command) == "False"


def test_the_working_directory_is_imported_from_where_it_is_named(workers: Workers, tmp_path: Path) -> None:
    assert looked(workers, tmp_path, "--path", ".") == "True"
    assert looked(workers, tmp_path, "--path", str(tmp_path)) == "True"
    assert looked(workers, tmp_path, python_path=f"{ROOT}:{tmp_path}") == "True"


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
