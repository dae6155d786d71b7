"""One page's commands can be done, and what can be said of the others; `python -m ops.documents` runs all."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from ops.documents.blocks import PAGES, ROOT, commands
from ops.documents.options import check_syntax, simple_commands, unknown_options
from ops.documents.runner import PageRunner
from ops.documents.stage import Stage, running_stage

pytestmark = pytest.mark.processes

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


def test_the_page_of_producers_runs(runner: PageRunner) -> None:
    found = commands(PRODUCER)
    assert len(found) >= 8
    assert [block.place for block in found if block.not_run is not None] == []
    for block in found:
        runner.run(block)
    runner.check_jobs()
