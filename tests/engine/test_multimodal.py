"""The text part of models that read images too: its greedy tokens are the whole model's, given text alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from engine import ConfigError, Engine, UnsupportedModel, WeightMismatch
from engine.checkpoint.model_config import read_model_config
from tests.engine.family_runs import config_of, run
from tests.engine.multimodal import (
    BY_NAME,
    MultimodalReference,
    make_multimodal,
    write_as_the_hub_has_gemma3,
    write_as_the_hub_has_qwen2_5_vl,
    write_in_the_other_layout,
)


@pytest.fixture(params=BY_NAME)
def reference(request: pytest.FixtureRequest, tmp_path: Path) -> MultimodalReference:
    return MultimodalReference(make_multimodal(tmp_path / "model", BY_NAME[request.param]))


def test_greedy_tokens_equal_the_whole_models(reference: MultimodalReference) -> None:
    """As transformers 5 saves it, in the other layout, and read as one where the head is tied by mistake."""
    assert run(reference)[0] == []
    write_in_the_other_layout(reference.folder)
    assert run(reference, "whole")[0] == []
    config = json.loads((reference.folder / "config.json").read_text())
    (reference.folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    assert run(reference, "whole")[0] == []


@pytest.mark.parametrize(
    ("name", "rewrite"),
    [("qwen2_5_vl", write_as_the_hub_has_qwen2_5_vl), ("gemma3", write_as_the_hub_has_gemma3)],
)
def test_an_older_file_is_read_alike(tmp_path: Path, name: str, rewrite: Callable[[Path], None]) -> None:
    reference = MultimodalReference(make_multimodal(tmp_path / "model", BY_NAME[name]))
    assert reference.answers
    rewrite(reference.folder)
    assert run(reference, "whole")[0] == []


def test_an_unknown_part_is_refused_by_its_name(tmp_path: Path) -> None:
    folder = make_multimodal(tmp_path / "model", BY_NAME["mistral3"])
    tensors = load_file(folder / "model.safetensors")
    tensors["hearing.weight"] = tensors["language_model.model.norm.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WeightMismatch, match=r"'hearing\.weight', for which this model has no place"):
        Engine(config_of(folder))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (
            {"architectures": ["MllamaForConditionalGeneration"]},
            UnsupportedModel,
            "Mllama.* reads more than text",
        ),
        ({"text_config": {"model_type": "evil"}}, ConfigError, r"config\.json cannot be read"),
        ({"model_type": "evil", "auto_map": {"AutoConfig": "evil.T"}}, ConfigError, "cannot be read"),
    ],
)
def test_what_is_not_served_is_refused_by_name(
    tmp_path: Path, change: dict[str, Any], error: type[Exception], words: str
) -> None:
    folder = make_multimodal(tmp_path / "model", BY_NAME["mistral3"])
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(error, match=words):
        read_model_config(folder)
