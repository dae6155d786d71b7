"""The fenced blocks of the pages, and what comments before them say of how they run.

A block of `sh` or `python` is a command that readers copy. A block of `text` right behind one is what it
prints, with `…` for what differs from run to run. Comments before a block, which no reader sees, say more:

    <!-- not run: REASON -->             here it cannot run, such as for want of a GPU
    <!-- runs until it says "TEXT" -->   it does not end by itself; SIGTERM stops it once it has printed TEXT
    <!-- exits with 1 -->                it ends with another status than 0
    <!-- first: COMMAND -->              a shell command that makes what the block needs
"""

import re
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))

RUN = ("sh", "python")
SHOWN = ("text", "json", "yaml", "ini", "promql")
"""Languages of blocks that are commands, and of those that are none."""

_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<info>[^\n`]*)\n(?P<body>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL
)
_COMMENTS = re.compile(r"(?:<!-- .*? -->\s*)+\Z", re.DOTALL)
_COMMENT = re.compile(r"<!-- (.*?) -->", re.DOTALL)


class BadBlock(Exception):
    """A block's language, or a comment before it, is none of those that are known."""


@dataclass
class Block:
    """A fenced block of a page."""

    page: str
    line: int
    """Of the fence that opens it, from 1."""
    language: str
    body: str
    not_run: str | None = None
    """Why it cannot run here."""
    until: str | None = None
    """What it prints when it may be stopped; None for a block that ends by itself."""
    status: int = 0
    first: list[str] = field(default_factory=list)
    prints: str | None = None
    """The block of `text` behind it."""

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


def commands(page: Path) -> list[Block]:
    """The page's blocks of `sh` and `python`, in order. Raises BadBlock, naming the place."""
    text, name = page.read_text(), str(page.relative_to(ROOT))
    found: list[Block] = []
    behind: Block | None = None  # the command that the fence before this one is
    end = 0
    for fence in _FENCE.finditer(text):
        block = Block(name, text.count("\n", 0, fence.start()) + 1, fence["info"], fence["body"])
        before = text[end : fence.start()]
        if block.language in RUN:
            _read_comments(block, before)
            found.append(block)
        elif block.language not in SHOWN:
            known = ", ".join(RUN + SHOWN)
            raise BadBlock(f"{block.place}: a block of {block.language!r}; known are {known}")
        elif behind is not None and block.language == "text" and not before.strip():
            behind.prints = block.body
        behind = block if block.language in RUN else None
        end = fence.end()
    return found


def _read_comments(block: Block, before: str) -> None:
    comments = _COMMENTS.search(before)
    for said in _COMMENT.findall(comments[0]) if comments else []:
        key, _, value = (part.strip() for part in said.partition(":"))
        if key == "not run" and value:
            block.not_run = " ".join(value.split())
        elif key == "first" and value:
            block.first.append(value)
        elif match := re.fullmatch(r'runs until it says "(.+)"', said):
            block.until = match[1]
        elif match := re.fullmatch(r"exits with (\d+)", said):
            block.status = int(match[1])
        else:
            raise BadBlock(f"{block.place}: <!-- {said} --> says nothing that is known of a block")
