"""Runs every command of README and docs/ with a real Redis and worker: python -m ops.documents [PAGE...].

What a page marks as not running here is parsed, its options are looked up in the programs' --help, and it is
listed with its reason. Exits with 1 where a block does not do what its page says.
"""

import sys
import time
from pathlib import Path

import click

from ops.documents.blocks import PAGES, Block, commands
from ops.documents.options import check_syntax, simple_commands, unknown_options
from ops.documents.runner import BlockFailed, PageRunner
from ops.documents.stage import Stage, running_stage


@click.command()
@click.argument("pages", nargs=-1, type=click.Path(exists=True, path_type=Path))
@click.option(
    "--list", "only_list", is_flag=True, help="Run nothing: check, and list what would not run."
)
def main(pages: tuple[Path, ...], only_list: bool) -> None:
    """Run the commands of these pages, by default of all."""
    found = {page: commands(page.resolve()) for page in pages or PAGES}
    failures = [said for blocks in found.values() for block in blocks for said in checked(block)]
    if not only_list:
        with running_stage() as stage:
            for page, blocks in found.items():
                failures += run_page(stage, page, blocks)
    for block in (
        block for blocks in found.values() for block in blocks if block.not_run is not None
    ):
        print(f"not run  {block.place}: {block.not_run}")
    for failure in failures:
        print(f"\n{failure}")
    blocks = [block for each in found.values() for block in each]
    kept = sum(block.not_run is not None for block in blocks)
    print(f"\n{len(blocks)} blocks, {kept} of them not run here; {len(failures)} failures")
    sys.exit(1 if failures else 0)


def checked(block: Block) -> list[str]:
    """What is wrong with a block before it runs."""
    check_syntax(block)
    wrong = []
    for words in simple_commands(block):
        if unknown := unknown_options(words):
            wrong.append(f"{block.place}: {' '.join(words[:2])} has no {', '.join(unknown)}")
    return wrong


def run_page(stage: Stage, page: Path, blocks: list[Block]) -> list[str]:
    """Run a page's blocks; return what failed. The blocks behind a failure run too."""
    runner = PageRunner(stage)
    failures = []
    try:
        for block in blocks:
            if block.not_run is None:
                began = time.monotonic()
                try:
                    runner.run(block)
                except BlockFailed as failure:
                    failures.append(str(failure))
                print(f"{time.monotonic() - began:6.1f} s  {block.place}", flush=True)
        try:
            runner.check_jobs()
        except BlockFailed as failure:
            failures.append(f"{page.name}: {failure}")
    finally:
        runner.close()
    return failures


if __name__ == "__main__":
    main()
