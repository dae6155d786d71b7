"""What can be asked for stands in README and docs/, options of the command line with a help text too."""

import dataclasses
import inspect
import re
from pathlib import Path

import click
import pytest

import jobs
from engine import SamplingParams
from jobs.cli import main
from worker.settings import WorkerSettings

ROOT = Path(__file__).parents[3]
PAGES = "\n".join(
    page.read_text() for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
)

#: Workers enqueue these among themselves.
INTERNAL = {"score_shard", "survey_parquet", "verify_rows"}


@pytest.mark.parametrize("name", ["submit", "preview", "verify"])
def test_each_option_has_a_help_text_and_is_documented(name: str) -> None:
    options = [each for each in main.commands[name].params if isinstance(each, click.Option)]
    assert options
    assert [each.opts[0] for each in options if not each.help] == []
    pages = PAGES.replace("--[no-]", "--")
    assert [each.opts[0] for each in options if not re.search(rf"{each.opts[0]}\b", pages)] == []


def test_each_sampling_value_is_documented() -> None:
    names = [each.name for each in dataclasses.fields(SamplingParams)]
    assert [name for name in names if not re.search(rf"`{name}\b", PAGES)] == []


def test_each_argument_of_a_job_function_is_documented() -> None:
    """Those of a run as options of the command line."""
    words = set(re.findall(r"[a-z_]+", PAGES.replace("--", "").replace("-", "_")))
    functions = {name: getattr(jobs, name) for name in jobs.__all__ if name not in INTERNAL}
    assert "complete" in functions
    for name, function in functions.items():
        if inspect.isfunction(function):
            arguments = inspect.signature(function).parameters.values()
            named = {each.name for each in arguments if each.kind is not each.VAR_KEYWORD}
            assert named - words == set(), name


def test_the_table_of_settings_has_each_and_no_other() -> None:
    table = (
        (ROOT / "docs/operator.md")
        .read_text()
        .partition("\n## Settings\n")[2]
        .partition("\n\n## ")[0]
    )
    listed = {
        name
        for row in re.findall(r"^\|([^|]*)\|", table, re.MULTILINE)
        for name in re.findall("TOKENMILL_[A-Z_]+", row)
    }
    assert listed == {f"TOKENMILL_{name.upper()}" for name in WorkerSettings.model_fields}


def test_the_examples_in_python_are_python() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGES, re.DOTALL)
    assert len(blocks) >= 5
    for block in blocks:
        compile(block, "docs", "exec")
