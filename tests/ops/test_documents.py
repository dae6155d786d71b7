"""What the pages tell their readers to do can be done: each command, but those that are marked with a reason.

`python -m ops.documents` runs all; here is one page, and what can be said of the others without running them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ops.documents import blocks as of_pages
from ops.documents.blocks import PAGES, ROOT, BadBlock, Block, commands
from ops.documents.options import BadSyntax, check_syntax, simple_commands, unknown_options
from ops.documents.runner import BlockFailed, PageRunner
from ops.documents.stage import Stage, running_stage

PRODUCER = ROOT / "docs" / "producer.md"


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with running_stage() as running:
        yield running


@pytest.fixture
def runner(stage: Stage) -> Iterator[PageRunner]:
    page = PageRunner(stage)
    yield page
    page.close()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_commands_of_a_page_parse_and_have_options_that_exist(page: Path) -> None:
    for block in commands(page):
        check_syntax(block)
        for words in simple_commands(block):
            assert not unknown_options(words), block.place


def test_what_does_not_run_here_is_the_smaller_part() -> None:
    found = [block for page in PAGES for block in commands(page)]
    kept = [f"{block.place}: {block.not_run}" for block in found if block.not_run is not None]
    assert len(kept) < len(found) / 3, kept


def test_the_page_of_producers_runs(runner: PageRunner) -> None:
    found = commands(PRODUCER)
    assert len(found) >= 8
    assert [block.place for block in found if block.not_run is not None] == []
    for block in found:
        runner.run(block)
    runner.check_jobs()


@pytest.mark.parametrize(
    ("block", "says"),
    [
        (Block("p", 1, "sh", "false\n"), "exited with 1, not 0"),
        (Block("p", 1, "sh", "true\n", status=3), "exited with 0, not 3"),
        (Block("p", 1, "sh", "echo a\n", prints="b\n"), "printed\na"),
        (Block("p", 1, "sh", "echo a\n", until="b"), "never said 'b'"),
        (Block("p", 1, "sh", "true\n", first=["false"]), "first: false"),
        (Block("p", 1, "python", "no_such_name\n"), "NameError"),
    ],
)
def test_a_block_that_does_not_do_what_its_page_says_fails(
    runner: PageRunner, block: Block, says: str
) -> None:
    with pytest.raises(BlockFailed, match=says):
        runner.run(block)


def test_a_job_that_fails_unexpectedly_fails_its_page(runner: PageRunner) -> None:
    job = "rq enqueue --quiet -S json -q prompts --job-id {} jobs.complete prompt=a max_tokens=1"
    runner.run(Block("p", 1, "sh", job.format("wrong-on-purpose")))
    runner.check_jobs()
    runner.run(Block("p", 1, "sh", job.format("another")))
    with pytest.raises(BlockFailed, match="another"):
        runner.check_jobs()


def test_blocks_are_read_with_what_their_comments_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(of_pages, "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- first: touch a -->\n<!-- exits with 1 -->\n```sh\ntest -e b\n```\n\n```text\nno\n```\n\n"
        'Text.\n\n```text\nyes\n```\n<!-- runs until it says "on: 1" -->\n```sh\nsleep 9\n```\n'
        "<!-- not run: no GPU\nhere -->\n```python\n1\n```\n"
    )
    assert commands(page) == [
        Block("page.md", 3, "sh", "test -e b\n", status=1, first=["touch a"], prints="no\n"),
        Block("page.md", 17, "sh", "sleep 9\n", until="on: 1"),
        Block("page.md", 22, "python", "1\n", not_run="no GPU here"),
    ]


@pytest.mark.parametrize(
    "text", ["```bash\ntrue\n```\n", "```\ntrue\n```\n", "<!-- not run: -->\n```sh\ntrue\n```\n"]
)
def test_a_block_cannot_be_left_out_in_silence(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(of_pages, "ROOT", tmp_path)
    (tmp_path / "page.md").write_text(text)
    with pytest.raises(BadBlock):
        commands(tmp_path / "page.md")


def test_what_is_wrong_with_a_command_is_seen_without_running_it() -> None:
    block = Block(
        "p", 1, "sh", "A=1 tokenmill submit in out \\\n  --no-such 1 && rq worker --burst | tee --append x\n"
    )
    assert [unknown_options(words) for words in simple_commands(block)] == [["--no-such"], [], []]
    with pytest.raises(BadSyntax):
        check_syntax(Block("p", 1, "sh", "if true\n"))
    with pytest.raises(BadSyntax):
        check_syntax(Block("p", 1, "python", "if True\n"))
