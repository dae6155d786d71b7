"""Producers load little, and files stay readable. `lint-imports` holds the layers (pyproject.toml)."""

import subprocess
import sys
from pathlib import Path

import pytest

from ops.size.__main__ import shape_problems

ROOT = Path(__file__).parents[1]
HEAVY = {"torch", "transformers", "pyarrow"}


def modules_loaded_by(module: str) -> set[str]:
    """Top-level names in sys.modules of a fresh interpreter that imported one module."""
    code = f"import sys, {module}; print(' '.join(name.split('.')[0] for name in sys.modules))"
    command = [sys.executable, "-c", code]
    return set(
        subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout.split()
    )


@pytest.mark.processes
@pytest.mark.parametrize(
    "module", ["jobs", "jobs.cli", "tokenmill.server.serve", "worker", "worker.batch_worker"]
)
def test_light_modules_load_nothing_heavy(module: str) -> None:
    assert HEAVY & modules_loaded_by(module) == set()


@pytest.mark.processes
def test_what_producers_import_loads_neither_worker_nor_engine() -> None:
    assert {"engine", "worker"} & modules_loaded_by("jobs.installed") == set()


@pytest.mark.processes
def test_the_engine_loads_nothing_of_queues_and_files() -> None:
    assert {"redis", "rq", "pyarrow", "jobs", "worker"} & modules_loaded_by(
        "engine.engine"
    ) == set()


def test_no_folder_and_no_function_holds_too_much() -> None:
    assert list(shape_problems()) == []
