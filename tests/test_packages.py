"""Dependencies point one way, and a producer's install stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEAVY = {"torch", "transformers", "pyarrow"}
MAY_IMPORT = {"engine": {"engine"}, "jobs": {"jobs"}, "worker": {"worker", "jobs", "engine"}}
OURS = {"engine", "jobs", "worker", "ops", "tests"}
EXCEPTION = ROOT / "jobs" / "stock_worker.py"


def imports(path: Path) -> set[tuple[str, bool]]:
    """(top-level package, imported when the module is loaded) of every import in a file."""
    tree = ast.parse(path.read_text())
    type_checking = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    inside = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
    }
    found = set()
    for node in ast.walk(tree):
        if id(node) in type_checking:
            continue
        if isinstance(node, ast.Import):
            found |= {(name.name.split(".")[0], id(node) not in inside) for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add((node.module.split(".")[0], id(node) not in inside))
    return found


def modules_loaded_by(module: str) -> set[str]:
    """Names in sys.modules of a fresh interpreter that imported one module."""
    command = [sys.executable, "-c", f"import sys, {module}; print(' '.join(sys.modules))"]
    return set(subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout.split())


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_packages_import_only_in_the_direction_of_the_design(package: str) -> None:
    for path in (ROOT / package).rglob("*.py"):
        wrong = {name for name, _ in imports(path)} & OURS - MAY_IMPORT[package]
        if path == EXCEPTION:
            assert {name for name, at_load in imports(path) if at_load} & OURS <= {"jobs"}
            assert wrong <= {"engine", "worker"}
        else:
            assert wrong == set(), f"{path} imports {wrong}"


@pytest.mark.parametrize("module", ["jobs", "jobs.cli", "worker", "worker.batch_worker"])
def test_light_modules_load_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print(' '.join(sys.modules))"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert HEAVY & set(loaded.stdout.split()) == set()


def test_the_engine_loads_nothing_of_queues_and_files() -> None:
    code = "import sys, engine.engine; print(' '.join(name.split('.')[0] for name in sys.modules))"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert {"redis", "rq", "pyarrow", "jobs", "worker"} & set(loaded.stdout.split()) == set()
