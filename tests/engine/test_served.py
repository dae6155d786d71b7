"""The table of what is served says what the code does, and docs/models.md repeats it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from engine.errors import UnsupportedModel
from engine.models import served
from engine.models.registry import ARCHITECTURES
from engine.models.served import model_table, nearest, refuse_known, served_architectures
from jobs.cli import main
from tests.engine.architectures import REFUSED, SERVED, class_name

ROOT = Path(__file__).parents[2]
HEAVY = (
    "torch",
    "transformers",
    "numpy",
    "safetensors",
    "tokenizers",
    "huggingface_hub",
    "xxhash",
    "pydantic",
)


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


def test_the_nearest_is_one_of_the_same_family() -> None:
    assert nearest("Olmo9ForCausalLM").startswith("the nearest that is served: Olmo")
    assert "Xyz" not in nearest("XyzForCausalLM")
    assert "lists what is served" in nearest("XyzForCausalLM")


def test_the_page_of_models_has_the_table() -> None:
    """Where this fails, put the output of `tokenmill models` there."""
    assert f"```text\n{model_table()}\n```" in (ROOT / "docs/models.md").read_text()


def test_the_command_prints_it() -> None:
    result = CliRunner().invoke(main, ["models"])
    assert result.exit_code == 0
    assert result.output == f"{model_table()}\n"
    assert all(name in result.output for name in ARCHITECTURES)


def test_the_command_needs_no_more_than_a_producers_install() -> None:
    blocked = "".join(f"sys.modules[{name!r}] = None; " for name in HEAVY)
    code = f"import sys; {blocked}from jobs.cli import main; main(['models'])"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    assert "BloomForCausalLM" in done.stdout
