"""Two engines have one fingerprint exactly when they serve the same model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import EngineConfig, MissingWeights, model_identity
from tests.engine.checkpoints import shard


@pytest.fixture
def copy(folders: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(folders["gqa1_untied"], tmp_path / "copy"))


def fingerprint(folder: Path, dtype: str = "auto") -> str:
    return model_identity(EngineConfig(str(folder), dtype=dtype)).fingerprint


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_copy_in_another_folder_or_in_shards_is_the_same_model(
    folders: dict[str, Path], copy: Path
) -> None:
    original = fingerprint(folders["gqa1_untied"])
    assert fingerprint(copy) == original
    shard(copy)
    assert fingerprint(copy) == original


def test_a_dtype_is_another_model_and_auto_is_the_checkpoints_own(copy: Path) -> None:
    assert fingerprint(copy) == fingerprint(copy, "float32") != fingerprint(copy, "bfloat16")
    assert model_identity(EngineConfig(str(copy), dtype="bfloat16")).dtype == "bfloat16"


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tokenizer_config.json", "chat_template.jinja"]
)
def test_configuration_tokenizer_and_template_count(copy: Path, name: str) -> None:
    before, path = fingerprint(copy), copy / name
    path.write_text((path.read_text() if path.exists() else "") + "\n")
    assert fingerprint(copy) != before


def test_files_that_the_engine_does_not_read_do_not_count(copy: Path) -> None:
    before = fingerprint(copy)
    (copy / "README.md").write_text("x")
    (copy / "trainer_state.json").write_text(json.dumps({"step": 1}))
    assert fingerprint(copy) == before


def test_a_small_tensor_counts_to_its_last_value(copy: Path) -> None:
    before = fingerprint(copy)

    def nudge(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.norm.weight"][-1] += 1e-3

    change_weights(copy, nudge)
    assert fingerprint(copy) != before


def test_further_training_of_one_large_tensor_is_found(copy: Path) -> None:
    before = fingerprint(copy)

    def train(tensors: dict[str, torch.Tensor]) -> None:
        name = "model.embed_tokens.weight"
        assert tensors[name].nbytes > 1 << 16, "read in samples"
        tensors[name] *= 1.001

    change_weights(copy, train)
    assert fingerprint(copy) != before


def test_a_truncated_file_is_refused(copy: Path) -> None:
    path = copy / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(MissingWeights, match="too soon"):
        fingerprint(copy)
