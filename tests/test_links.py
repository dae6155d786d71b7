"""Links between the Markdown files of the clone lead to files and headings that are there."""

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE_PAGES = sorted(ROOT.glob("*/README.md"))
PAGES = sorted(
    [*ROOT.glob("*.md"), *PACKAGE_PAGES, *ROOT.glob("docs/*.md"), *ROOT.glob("ops/demo/*.md")]
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_each_link_leads_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!\w+:)([^)\s#]*)(?:#([^)\s]*))?\)", without_code(page.read_text()))
    targets = [(page.parent / path if path else page, anchor) for path, anchor in links]
    assert [str(path) for path, _ in targets if not path.exists()] == []
    assert [
        (str(path), anchor) for path, anchor in targets if anchor and anchor not in anchors(path)
    ] == []


def test_a_link_to_a_file_of_code_is_called_as_the_file_is() -> None:
    """Else a page goes on naming a file that was merged into another."""
    text = "\n".join(page.read_text() for page in (ROOT / "ARCHITECTURE.md", *PACKAGE_PAGES))
    links = re.findall(r"\[`([^`]+\.(?:py|lua))`\]\(([^)#]+)\)", text)
    assert [link for link in links if Path(link[0]).name != Path(link[1]).name] == []


def test_the_map_stays_small_and_its_rows_short() -> None:
    """What is to be looked up for a change stands in the packages' READMEs, and a row is read at a glance."""
    assert len((ROOT / "ARCHITECTURE.md").read_bytes()) <= 12 * 1024
    assert {page.parent.name for page in PACKAGE_PAGES} >= {"engine", "jobs", "worker", "sandbox"}
    rows = [
        line
        for page in PACKAGE_PAGES
        for line in page.read_text().splitlines()
        if line.startswith("|")
    ]
    assert [row for row in rows if len(row) > 250] == []


@cache
def anchors(page: Path) -> set[str]:
    """The names by which GitHub and the site know the page's headings."""
    headings = re.findall(r"^#+ (.*)$", without_blocks(page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def without_blocks(text: str) -> str:
    """The text but its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def without_code(text: str) -> str:
    """The text but what stands in code: there brackets and parentheses are no link."""
    return re.sub(r"(?<!\[)`[^`\n]+`(?!\])", "", without_blocks(text))
