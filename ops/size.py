"""Size of the project and its bars: `python -m ops.size [SUITE_SECONDS]`. Exits with 1 where one is passed.

Lines are those of .py, .lua and .sh files, blank ones too. Entries of a folder leave `__init__.py` out. What
a change takes to read is the files that the first sentence of its row in ARCHITECTURE.md links to.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("engine", "jobs", "worker", "sandbox", "tokenmill")
CODE = (".py", ".lua", ".sh")
MANY_PARAMETERS = 8


#: Package -> those that it may import.
ARROWS = {"jobs": {"sandbox"}, "engine": {"sandbox"}, "worker": {"jobs", "engine"}, "sandbox": set()}


def main() -> int:
    """Print each figure and its bar."""
    way = linked(section("How one prompt travels"))
    figures = [
        ("product without ops, lines", sum(map(lines, PRODUCT)), 53_000),
        ("jobs, lines", lines("jobs"), 16_500),
        ("ops, lines", lines("ops"), 5_000),
        ("tests, lines", lines("tests"), 40_000),
        ("most entries of a folder", max(map(num_entries, folders())), 15),
        ("upward arrows between packages", len(list(upward_arrows())), 0),
        (f"functions of {MANY_PARAMETERS} parameters or more", len(list(wide_functions())), 10),
        ("to read: a sampling parameter, lines", to_read("a sampling parameter", "one that the sampler reads.*?"), 900),
        ("to read: the queue, lines", to_read("the queue"), 3_500),
        ("files of a prompt's way", len(way), 20),
        ("stops of a prompt's way", len(re.findall(r"^\d+\. ", section("How one prompt travels"), re.M)), 8),
        ("words of README.md", words("README.md"), 600),
        ("words of docs/", words("docs/*.md"), 15_000),
        ("words of RESULTS.md", words("**/RESULTS.md"), 1_800),
        ("lines of CHANGELOG.md", len((ROOT / "CHANGELOG.md").read_text().splitlines()), 60),
    ]
    if len(sys.argv) > 1:
        figures.append(("suite, seconds", int(sys.argv[1]), 360))
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


def section(title: str) -> str:
    """Return a section of ARCHITECTURE.md."""
    return (ROOT / "ARCHITECTURE.md").read_text().partition(f"## {title}\n")[2].partition("\n## ")[0]


def linked(text: str) -> set[Path]:
    """Return the files that a text links to."""
    return {ROOT / found for found in re.findall(r"\]\(([a-z][^):#]*)\)", text)}


def to_read(*changes: str) -> int:
    found = set[Path]()
    for change in changes:
        row = re.search(rf"^\| {change} \| (.*?)(?:\. |\|$)", (ROOT / "ARCHITECTURE.md").read_text(), re.M)
        assert row is not None, f"ARCHITECTURE.md has no row {change!r}"
        found |= linked(row[1])
    return sum(each.read_text().count("\n") for place in found for each in code_of(place))


def code_of(place: Path) -> list[Path]:
    return [each for each in place.rglob("*") if each.suffix in CODE] if place.is_dir() else [place]


def upward_arrows() -> Iterator[str]:
    """Yield the imports that lead from a package to one above it."""
    pattern = re.compile(r"^\s*(?:from|import) (\w+)", re.M)
    for top, below in ARROWS.items():
        for path in (path for path in files(top) if path.suffix == ".py"):
            above = set(pattern.findall(path.read_text())) & {*PRODUCT, "ops", "tests"} - below - {top}
            yield from (f"{path} imports {package}" for package in above)


def folders() -> Iterator[Path]:
    """Yield every folder of the product and of ops."""
    for top in (*PRODUCT, "ops"):
        yield ROOT / top
        yield from (path for path in (ROOT / top).rglob("*") if path.is_dir() and is_ours(path))


def num_entries(folder: Path) -> int:
    return sum(path.name not in ("__pycache__", "__init__.py", "out", "py.typed") for path in folder.iterdir())


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
