"""Producers load little, and files stay readable. `lint-imports` holds the layers (pyproject.toml)."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEAVY = {"torch", "transformers", "pyarrow"}
PACKAGES = ("engine", "jobs", "sandbox", "tokenmill", "worker")
MAX_FILE_LINES, MAX_FUNCTION_LINES = 500, 60
MAX_ENTRIES = {"engine": 15, "jobs": 15}


def modules_loaded_by(module: str) -> set[str]:
    """Top-level names in sys.modules of a fresh interpreter that imported one module."""
    code = f"import sys, {module}; print(' '.join(name.split('.')[0] for name in sys.modules))"
    command = [sys.executable, "-c", code]
    return set(subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout.split())


@pytest.mark.parametrize("module", ["jobs", "jobs.cli", "worker", "worker.batch_worker"])
def test_light_modules_load_nothing_heavy(module: str) -> None:
    assert HEAVY & modules_loaded_by(module) == set()


def test_what_producers_import_loads_neither_worker_nor_engine() -> None:
    assert {"engine", "worker"} & modules_loaded_by("jobs.installed") == set()


def test_the_engine_loads_nothing_of_queues_and_files() -> None:
    assert {"redis", "rq", "pyarrow", "jobs", "worker"} & modules_loaded_by("engine.engine") == set()


@pytest.mark.parametrize("package", PACKAGES)
def test_no_file_and_no_function_is_too_long_to_read(package: str) -> None:
    for path in (ROOT / package).rglob("*.py"):
        text = path.read_text()
        assert text.count("\n") <= MAX_FILE_LINES, path
        if any("kernels" in part for part in path.parts):  # theirs is a single loop
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                assert node.end_lineno - node.lineno < MAX_FUNCTION_LINES, f"{path}: {node.name}"


@pytest.mark.parametrize("package", MAX_ENTRIES)
def test_the_top_of_a_package_can_be_seen_at_a_glance(package: str) -> None:
    entries = [path for path in (ROOT / package).iterdir() if path.name not in ("__pycache__", "py.typed")]
    assert len(entries) <= MAX_ENTRIES[package], entries
