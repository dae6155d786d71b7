"""The text part of models that read images too: its greedy tokens are the whole model's, given text alone."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma3nConfig

from engine import ConfigError, Engine, UnsupportedModel
from engine.checkpoint.model_config import read_model_config
from ops.models.__main__ import compared, reference_of
from ops.models.checkpoints import CAUSAL, WITH_IMAGES, make
from tests.engine.architectures import ArchitectureRuns, small
from tests.engine.family_runs import run
from tests.engine.reference import Reference


def write_in_the_other_layout(folder: Path) -> None:
    """Rename the tensors as transformers 4.52 to 4.57 named them, or for Qwen3-VL as older ones did."""
    tensors = load_file(folder / "model.safetensors")
    renamed = {}
    for name, tensor in tensors.items():
        if any(each.startswith("model.language_model.") for each in tensors):
            new = re.sub(r"^model\.(language_model|visual)\.", r"\1.", name)
            new = re.sub(r"^language_model\.", "language_model.model.", new)
            renamed[re.sub(r"^lm_head", "language_model.lm_head", new)] = tensor
            continue
        new = re.sub(r"^language_model\.lm_head", "lm_head", name)
        new = re.sub(
            r"^language_model\.model\.|^model\.(?=layers|embed|norm)", "model.language_model.", new
        )
        renamed[re.sub(r"^(vision_tower|multi_modal|visual)", r"model.\1", new)] = tensor
    assert renamed.keys() != tensors.keys()
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})


def write_as_the_hub_has_qwen2_5_vl(folder: Path) -> None:
    """The text part's values beside the others, the rotation told in `rope_scaling`."""
    config = json.loads((folder / "config.json").read_text())
    text = config.pop("text_config")
    parameters = text.pop("rope_parameters")
    config |= {
        key: value for key, value in text.items() if key not in ("model_type", "layer_types")
    }
    config |= {
        "rope_theta": parameters["rope_theta"],
        "rope_scaling": {"type": "mrope", "mrope_section": parameters["mrope_section"]},
        "torch_dtype": config.pop("dtype"),
    }
    (folder / "config.json").write_text(json.dumps(config))


def write_as_the_hub_has_gemma3(folder: Path) -> None:
    """Older keys for the rotations and the layers, and nothing of what is the default of Gemma3TextConfig."""
    config = json.loads((folder / "config.json").read_text())
    text = config["text_config"]
    ropes = text.pop("rope_parameters")
    del text["layer_types"], text["_sliding_window_pattern"], text["rms_norm_eps"]
    text |= {
        "rope_theta": ropes["full_attention"].pop("rope_theta"),
        "rope_scaling": ropes["full_attention"],
        "rope_local_base_freq": ropes["sliding_attention"]["rope_theta"],
        "sliding_window_pattern": 3,
    }
    config["torch_dtype"] = config.pop("dtype")
    (folder / "config.json").write_text(json.dumps(config))


def make_reference(folder: Path, name: str) -> Reference:
    """transformers' whole model, given text alone."""
    return reference_of(folder, make(folder, WITH_IMAGES, name))


@pytest.fixture(
    params=[
        "gemma3",
        "qwen2_5_vl",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("llama4", "mistral3", "qwen3_5")),
    ]
)
def reference(request: pytest.FixtureRequest, tmp_path: Path) -> Reference:
    return make_reference(tmp_path / "model", request.param)


def test_greedy_tokens_equal_the_whole_models(reference: Reference) -> None:
    """As transformers 5 saves it, in the other layout, and read as one where the head is tied by mistake."""
    assert run(reference)[0] == []
    if not read_model_config(reference.folder).architecture.endswith("ForCausalLM"):
        return  # through transformers, which knows one layout
    write_in_the_other_layout(reference.folder)
    assert run(reference, "whole")[0] == []
    config = json.loads((reference.folder / "config.json").read_text())
    (reference.folder / "config.json").write_text(
        json.dumps({**config, "tie_word_embeddings": True})
    )
    assert run(reference, "whole")[0] == []


@pytest.mark.parametrize(
    ("name", "rewrite"),
    [("qwen2_5_vl", write_as_the_hub_has_qwen2_5_vl), ("gemma3", write_as_the_hub_has_gemma3)],
)
def test_an_older_file_is_read_alike(
    tmp_path: Path, name: str, rewrite: Callable[[Path], None]
) -> None:
    reference = make_reference(tmp_path / "model", name)
    assert reference.answers
    rewrite(reference.folder)
    assert run(reference, "whole")[0] == []


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (
            {"architectures": ["MllamaForConditionalGeneration"]},
            UnsupportedModel,
            "MllamaForC.* takes a MllamaC",
        ),
        ({"architectures": ["Mistral3Model"]}, UnsupportedModel, "Mistral3Model has no LM head"),
        ({"text_config": {"model_type": "evil"}}, ConfigError, r"config\.json cannot be read"),
        (
            {"model_type": "evil", "auto_map": {"AutoConfig": "evil.T"}},
            ConfigError,
            "cannot be read",
        ),
    ],
)
def test_what_is_not_served_is_refused_by_name(
    tmp_path: Path, change: dict[str, Any], error: type[Exception], words: str
) -> None:
    folder = tmp_path / "model"
    make(folder, WITH_IMAGES, "mistral3")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(error, match=words):
        Engine(small(folder))


def test_the_text_is_served_where_a_part_for_images_cannot_be_made(tmp_path: Path) -> None:
    """Gemma 3n's wants a package."""
    reference = ArchitectureRuns(tmp_path, "gemma3n_text").reference
    assert reference.answers
    tensors = load_file(tmp_path / "model.safetensors")
    named = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in tensors.items()
    }
    save_file(
        {**named, "model.vision_tower.x": torch.ones(1)},
        tmp_path / "model.safetensors",
        {"format": "pt"},
    )
    text = json.loads((tmp_path / "config.json").read_text())
    whole = Gemma3nConfig(
        text_config=text, architectures=["Gemma3nForConditionalGeneration"], dtype="float32"
    )
    whole.save_pretrained(tmp_path)
    assert run(reference, "whole", block_bytes=1 << 16)[0] == []


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("gemma4_unified", "exact: through"),  # masks by what kind each token is
        ("glm4v", "exact: through"),  # a rotation of three parts
        ("kimi_k25", "exact: through"),
        ("mistral4", "exact: through"),  # a class that no auto class knows
        ("camembert", "refused: CamembertForCausalLM .* its positions are no count of all tokens"),
        ("bart", "exact: through"),  # whose body counts positions, and is told none
        ("cpmant", "refused: CpmAntForCausalLM .* 0 of its 3 layers attend"),
        ("paligemma", "refused: PaliGemmaForCond.* its attention is not causal"),
    ],
)
def test_the_table_of_models_says_what_comes_of_each(name: str, found: str, tmp_path: Path) -> None:
    """`python -m ops.models` prints it of all."""
    names = WITH_IMAGES if name in WITH_IMAGES else CAUSAL
    assert re.match(found, compared(tmp_path, names, name, six_modes=False))
