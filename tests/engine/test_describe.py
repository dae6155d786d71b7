"""`tokenmill models FOLDER`: how a checkpoint is served and what it takes, or a named error; none of its code runs."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from engine import Engine
from engine.attention.kv_cache import block_bytes
from engine.run.forward.model_runner import ModelRunner
from jobs.cli import main
from ops.models.checkpoints import CAUSAL, WITH_IMAGES, make
from tests.engine.architectures import small


def described(folder: Path) -> Result:
    return CliRunner().invoke(main, ["models", str(folder)])


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("bloom", ["through transformers", "3 of 3 layers: 4 heads over 4 of .*slopes"]),
        ("gemma2", ["natively", r"2 of 3 layers: .* a window of 20 tokens, a soft cap"]),
        (
            "kimi_k25",
            [
                "through transformers",
                "pictures +not read",
                "of 24 numbers",
                "2 of 4 for each token",
            ],
        ),
    ],
)
def test_a_served_model_is_described_as_it_will_be(
    name: str, lines: list[str], tmp_path: Path
) -> None:
    make(tmp_path, WITH_IMAGES if name in WITH_IMAGES else CAUSAL, name)
    with Engine(small(tmp_path)) as built:
        runner = built._open_runner()
        assert isinstance(runner, ModelRunner)
        size = block_bytes(runner.model.attention_layers, 1, runner.dtype)
    result = described(tmp_path)
    assert result.exit_code == 0
    for line in (
        *lines,
        f"KV cache +{size:,} bytes a token",
        r"weights +\d\.\d MiB",
        "a vocabulary of 512 tokens, a chat template",
    ):
        assert re.search(line, result.output), line


def changed(**values: Any) -> Callable[[Path], Any]:
    """config.json with other values, and code beside it."""

    def change(folder: Path) -> None:
        (folder / "evil.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\n")
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


CODE = {
    "model_type": "evil",
    "auto_map": {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"},
}


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (
            changed(architectures=["EvilForCausalLM"], **CODE),
            "UnsupportedModel: EvilForCausalLM is no model of",
        ),
        (
            changed(architectures=["GPT2LMHeadModel"], **CODE),
            "UnsupportedModel: .* read config.json of this GPT2LM",
        ),
        (
            changed(architectures=["GenerationMixin"]),
            "UnsupportedModel: GenerationMixin is no model",
        ),
        (
            changed(architectures=["GPT2LMHeadModel"]),
            "UnsupportedModel: GPT2LMHeadModel takes a GPT2Config",
        ),
        (
            changed(num_hidden_layers=2**30),
            "ConfigError: .*num_layers must be between 1 and 10000, got 1073741824",
        ),
        (
            changed(num_hidden_layers=99, layer_types=None),
            "WeightMismatch: .* 99 layers, the files 46 tensors",
        ),
        (
            lambda folder: (folder / "config.json").write_text("{"),
            "ConfigError: .* cannot be read as JSON",
        ),
        (
            lambda folder: (folder / "tokenizer.json").write_text("{}"),
            "ConfigError: the tokenizer in .* cannot be",
        ),
        (
            lambda folder: (folder / "model.safetensors").write_bytes(b"\xff" * 99),
            "MissingWeights: .*model.safetensors",
        ),
        (shutil.rmtree, "ModelNotFound"),
    ],
)
def test_what_is_wrong_with_a_folder_is_named(
    spoil: Callable[[Path], Any], error: str, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree("ops/demo/model", tmp_path / "model"))
    spoil(folder)
    result = described(folder)
    assert result.exit_code == 1
    assert re.search(error, result.output), result.output
    assert not (folder / "ran").exists()


def test_a_template_is_parsed_and_not_rendered(tmp_path: Path) -> None:
    folder = Path(shutil.copytree("ops/demo/model", tmp_path / "model"))
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    for template, words in (
        (loop, "a chat template\n"),
        ("{% for %}", "a chat template that cannot be parsed"),
    ):
        (folder / "chat_template.jinja").write_text(template)
        assert words in described(folder).output
