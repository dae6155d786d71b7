"""Size of the project beside its bars: `python -m ops.size`. Exits with 1 where one is passed.

Lines are those of .py, .lua and .sh files, blank ones too. Entries of a folder leave `__init__.py` out.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("engine", "jobs", "worker", "sandbox", "tokenmill_dashboard", "tokenmill_eval")
CODE = (".py", ".lua", ".sh")
MANY_PARAMETERS = 8


def main() -> int:
    """Print each figure and its bar."""
    figures = [
        ("product without ops, lines", sum(map(lines, PRODUCT)), 50_000),
        ("jobs, lines", lines("jobs"), 20_000),
        ("ops, lines", lines("ops"), 5_000),
        ("tests, lines", lines("tests"), 36_000),
        ("most entries of a folder", max(map(num_entries, folders())), 15),
        (f"functions of {MANY_PARAMETERS} parameters or more", len(list(wide_functions())), 10),
        ("words of README.md", words("README.md"), 600),
        ("words of docs/", words("docs/*.md"), 14_000),
        ("words of RESULTS.md", words("**/RESULTS.md"), 1_800),
        ("lines of CHANGELOG.md", len((ROOT / "CHANGELOG.md").read_text().splitlines()), 60),
    ]
    for name, value, bar in figures:
        print(f"{name:36}{value:>8,}  at most {bar:>6,}{'' if value <= bar else '  TOO MANY'}")
    return int(any(value > bar for _, value, bar in figures))


def files(folder: str) -> Iterator[Path]:
    """Yield the code of a folder."""
    return (path for path in sorted((ROOT / folder).rglob("*")) if path.suffix in CODE and is_ours(path))


def is_ours(path: Path) -> bool:
    return not {"__pycache__", "out"} & set(path.relative_to(ROOT).parts)


def lines(folder: str) -> int:
    return sum(path.read_text().count("\n") for path in files(folder))


def words(pages: str) -> int:
    found = (page for page in ROOT.glob(pages) if not page.relative_to(ROOT).parts[0].startswith("."))
    return sum(len(page.read_text().split()) for page in found)


def folders() -> Iterator[Path]:
    """Yield every folder of the product and of ops."""
    for top in (*PRODUCT, "ops"):
        yield ROOT / top
        yield from (path for path in (ROOT / top).rglob("*") if path.is_dir() and is_ours(path))


def num_entries(folder: Path) -> int:
    return sum(path.name not in ("__pycache__", "__init__.py", "out") for path in folder.iterdir())


def wide_functions() -> Iterator[str]:
    """Yield the functions with many parameters, kernels aside."""
    for path in (path for top in ("engine", "jobs", "worker") for path in files(top) if path.suffix == ".py"):
        if any("kernels" in part for part in path.relative_to(ROOT).parts):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                named = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                if sum(each.arg not in ("self", "cls") for each in named) >= MANY_PARAMETERS:
                    yield f"{path}:{node.lineno}"


if __name__ == "__main__":
    sys.exit(main())
