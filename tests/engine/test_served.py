"""The table of what is served says what the code does, and docs/models.md repeats it."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from engine.errors import UnsupportedModel
from engine.models import served
from engine.models.registry import ARCHITECTURES
from engine.models.served import model_table, refuse_known, served_architectures
from jobs.cli import main
from tests.engine.architectures import REFUSED, SERVED, class_name

ROOT = Path(__file__).parents[2]


def test_what_is_listed_is_what_was_compared() -> None:
    assert set(served.TRANSFORMERS) == set(map(class_name, SERVED))
    listed = {name for refused in served.REFUSED for name in refused.nearest}
    assert listed == set(map(class_name, REFUSED))
    assert not listed & served_architectures()


def test_what_is_named_instead_is_served() -> None:
    for refused in served.REFUSED:
        for name, instead in refused.nearest.items():
            assert instead in served_architectures()
            with pytest.raises(UnsupportedModel, match=f"{name} .*{instead}"):
                refuse_known([name])
    refuse_known([*served_architectures(), 7, None, ["x"]])


def test_the_page_of_models_has_the_table() -> None:
    """Where this fails, put the output of `tokenmill models` there."""
    assert f"```text\n{model_table()}\n```" in (ROOT / "docs/models.md").read_text()


def test_the_command_prints_it() -> None:
    result = CliRunner().invoke(main, ["models"])
    assert result.exit_code == 0
    assert result.output == f"{model_table()}\n"
    assert all(name in result.output for name in ARCHITECTURES)
