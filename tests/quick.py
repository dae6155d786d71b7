"""The quick tier: tests that need neither torch nor another process.

`bash ops/test.sh --quick` runs them. Nobody keeps a list. A file is left out if it would load torch: its imports are
read, and those of our modules that they lead to. A test is left out if it uses a server, or says by the marker
`processes` that it starts some. While the tier runs, a guard fails each test that loads torch or starts a process
all the same.
"""

from __future__ import annotations

import ast
import multiprocessing.util
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
#: What takes seconds to import.
HEAVY = frozenset({"numba", "torch", "transformers", "triton"})
#: The fixture that all fixtures with a Redis server rest on.
SERVER = "redis_executable"
#: What the interpreter tells audit hooks of before it makes a process.
STARTS = frozenset({"os.fork", "os.forkpty", "os.posix_spawn", "subprocess.Popen"})


class NotQuickError(Exception):
    """Raised in the quick tier where a test loads torch or starts a process."""


def loads_torch(path: Path) -> bool:
    """Whether a file loads torch when it is collected, with the conftests above it."""
    conftests = [folder / "conftest.py" for folder in path.parents if folder.is_relative_to(ROOT)]
    reached: set[Path] = set()
    waiting = [path, *(conftest for conftest in conftests if conftest.exists())]
    while waiting:
        file = waiting.pop()
        if file in reached:
            continue
        reached.add(file)
        for name in _imports(file):
            if name.partition(".")[0] in HEAVY:
                return True
            waiting += _files(name)
    return False


def uses_processes(item: pytest.Item) -> bool:
    """Whether a test says that it needs a server or a process of its own."""
    fixtures: list[str] = getattr(item, "fixturenames", [])
    return SERVER in fixtures or item.get_closest_marker("processes") is not None


@cache
def _imports(file: Path) -> list[str]:
    """Return the modules that a file imports when it is imported itself."""
    found: list[str] = []
    waiting: list[ast.AST] = [ast.parse(file.read_text(encoding="utf-8"))]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting += node.orelse
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            # A name may be a module of that package.
            found += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            waiting += ast.iter_child_nodes(node)
    return found


@cache
def _files(module: str) -> list[Path]:
    """Return our files that run when a module is imported: its own and those of the packages above it."""
    place = ROOT
    found: list[Path] = []
    for name in module.split("."):
        place /= name
        found += [
            file for file in (place / "__init__.py", place.with_suffix(".py")) if file.exists()
        ]
    return found


class Guard:
    """Fails tests that turn out not to be quick. A plugin of pytest."""

    def __init__(self) -> None:
        self._is_armed = False
        self._problems: list[str] = []
        # A hook cannot be taken away again, so it hears everything that this process does.
        sys.addaudithook(self._hear)
        # This function of the library tells audit hooks nothing.
        self._spawn = multiprocessing.util.spawnv_passfds
        multiprocessing.util.spawnv_passfds = self._hear_spawn

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Iterator[None]:
        """Watch one test with its fixtures."""
        self._problems.clear()
        self._is_armed = True
        try:
            return (yield)
        finally:
            self._is_armed = False

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self) -> Iterator[None]:
        """Fail a test whose own code has caught the error."""
        yield
        if self._problems:
            raise NotQuickError(self._problems[0])

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in STARTS:
            self._refuse(f"it starts a process ({event})")
        elif event == "import" and str(arguments[0]).partition(".")[0] in HEAVY:
            self._refuse(f"it loads {arguments[0]}")

    def _hear_spawn(self, path: Any, arguments: Any, descriptors: Any) -> Any:
        self._refuse("it starts a process (multiprocessing)")
        return self._spawn(path, arguments, descriptors)

    def _refuse(self, problem: str) -> None:
        if not self._is_armed:
            return
        problem = f"not for the quick tier, {problem}: mark it `processes`"
        self._problems.append(problem)
        raise NotQuickError(problem)
