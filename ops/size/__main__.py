"""Figures of the project: `python -m ops.size [SUITE_SECONDS] [--entered]`.

It fails on a house that no longer stands: an import that leads up, a circle, a folder of more than 15 entries, or a
function of more than 10 parameters. All other figures are told, and have no bar. With `--entered` a worker runs, and
the files that it enters for one prompt and for one row are told, too.
"""

import argparse
import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from ops.size.code_figures import CodeFigures, figures_of

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("engine", "jobs", "worker", "sandbox", "tokenmill")
CODE = (".py", ".lua", ".sh")

MAX_ENTRIES = 15
MAX_PARAMETERS = 10

#: Entries of a folder that are no idea of their own.
NOT_COUNTED = ("__pycache__", "__init__.py", "README.md", "out", "py.typed")

#: Of the wheels httpx 0.28.1, dramatiq 2.2.1 and rq 3.0.0, by code_figures.py: comprehensions, tuple assignments,
#: walrus and long lines for each 1,000 lines of code, then the share of public items that are documented.
PEERS = {
    "httpx": (9.7, 0.7, 0.0, 0.3, 0.53),
    "dramatiq": (5.9, 0.8, 0.0, 15.1, 0.58),
    "rq": (10.4, 0.3, 0.6, 33.8, 0.71),
}

#: Changes, each with the page and the row that say what to read for it.
CHANGES = {
    "a sampling parameter": ("engine/README.md", "a sampling parameter"),
    "the queue": ("ARCHITECTURE.md", "the queue"),
}


def main() -> int:
    """Print each figure; return 1 where the house does not stand."""
    parser = argparse.ArgumentParser(description="Print the project's figures.")
    parser.add_argument("suite_seconds", type=int, nargs="?", help="how long the tests took")
    parser.add_argument(
        "--entered", action="store_true", help="also run a worker, and tell which files it enters"
    )
    options = parser.parse_args()
    for folder in (*PRODUCT, "ops", "tests"):
        print(f"{folder:10}{lines(folder):>8,} lines in {len(list(files(folder))):>4,} files")
    for page in ("README.md", "ARCHITECTURE.md", "docs/*.md", "RESULTS.md", "CHANGELOG.md"):
        print(f"{words(page):>8,} words in {page}")
    for change, (page, row) in CHANGES.items():
        print(f"{to_read(page, row):>8,} lines in the files that one opens for {change}")
    if options.suite_seconds is not None:
        print(f"{options.suite_seconds:>8,} seconds took the suite")

    print(
        "\nfor 1,000 lines    comprehensions  tuple assignments  walrus  beyond 100 characters  documented"
    )
    for folder in PRODUCT:
        show_row(folder, shares(figures_of(path for path in files(folder) if path.suffix == ".py")))
    for peer, figures in PEERS.items():
        show_row(peer, figures)

    problems = [*shape_problems(), *import_problems()]
    print(*(f"\n{problem}" for problem in problems), sep="")
    if options.entered:
        print(flush=True)
        # In a process of its own: it must be the one that loads our modules.
        subprocess.run([sys.executable, "-m", "ops.size.entered"], cwd=ROOT, check=True)
    return int(bool(problems))


def shares(figures: CodeFigures) -> tuple[float, ...]:
    """Return what a line of the table shows."""
    counts = (figures.comprehensions, figures.tuple_assignments, figures.walrus, figures.long_lines)
    return *map(figures.per_thousand, counts), figures.documented_share


def show_row(name: str, figures: tuple[float, ...]) -> None:
    """Print a line of the table."""
    *counts, documented = figures
    widths = (16, 19, 8, 23)
    shown = "".join(f"{count:>{width}.1f}" for count, width in zip(counts, widths, strict=True))
    print(f"{name:17}{shown}{documented:>12.0%}")


def shape_problems() -> Iterator[str]:
    """Yield the folders and functions that hold too much."""
    for folder in folders():
        num_entries = sum(path.name not in NOT_COUNTED for path in folder.iterdir())
        if num_entries > MAX_ENTRIES:
            yield f"{folder.relative_to(ROOT)} has {num_entries} entries, more than {MAX_ENTRIES}: divide it by ideas"
    for place, num_parameters in wide_functions():
        yield f"{place} has {num_parameters} parameters, more than {MAX_PARAMETERS}: give some of them a type"


def import_problems() -> Iterator[str]:
    """Yield why imports lead up or in a circle. Which ones may be is said once, in pyproject.toml."""
    imports = subprocess.run(
        ["lint-imports", "--no-logo", "--no-cache"], cwd=ROOT, capture_output=True, text=True
    )
    if imports.returncode:
        yield f"an import leads up, or in a circle:\n{imports.stdout}"


def files(folder: str) -> Iterator[Path]:
    """Yield the code of a folder."""
    return (
        path for path in sorted((ROOT / folder).rglob("*")) if path.suffix in CODE and is_ours(path)
    )


def is_ours(path: Path) -> bool:
    """Whether a path is no cache and no output."""
    return not {"__pycache__", "out"} & set(path.relative_to(ROOT).parts)


def lines(folder: str) -> int:
    """Count the lines of a folder's code, blank ones too."""
    return sum(path.read_text().count("\n") for path in files(folder))


def words(pages: str) -> int:
    """Count the words of pages."""
    return sum(len(page.read_text().split()) for page in ROOT.glob(pages))


def to_read(page: str, row: str) -> int:
    """Count the lines of all files that a row of a page links to, whole files."""
    path = ROOT / page
    match = re.search(rf"^\| {row} \| (.*)$", path.read_text(), re.M)
    assert match is not None, f"{page} has no row {row!r}"
    places = {(path.parent / link).resolve() for link in re.findall(r"\]\(([^):#]+)\)", match[1])}
    code = {file for place in places for file in (place.rglob("*") if place.is_dir() else [place])}
    return sum(file.read_text().count("\n") for file in code if file.suffix in CODE)


def folders() -> Iterator[Path]:
    """Yield every folder of the product and of ops."""
    for top in (*PRODUCT, "ops"):
        yield ROOT / top
        yield from (path for path in (ROOT / top).rglob("*") if path.is_dir() and is_ours(path))


def wide_functions() -> Iterator[tuple[str, int]]:
    """Yield the functions with too many parameters, kernels aside, and how many they have."""
    for top in PRODUCT:
        for path in files(top):
            if path.suffix != ".py" or any(
                "kernels" in part for part in path.relative_to(ROOT).parts
            ):
                continue
            for node in ast.walk(ast.parse(path.read_text())):
                if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    continue
                parameters = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                count = sum(parameter.arg not in ("self", "cls") for parameter in parameters)
                if count > MAX_PARAMETERS:
                    yield f"{path.relative_to(ROOT)}:{node.lineno} {node.name}", count


if __name__ == "__main__":
    sys.exit(main())
