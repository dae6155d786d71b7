"""What may be wrong with a model's folder, or missing there: each error says what to change."""

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import (
    ConfigError,
    Engine,
    EngineConfig,
    MissingWeights,
    ModelNotFound,
    SamplingParams,
    UnsupportedModel,
    WeightMismatch,
)
from engine.checkpoint.folder import INDEX, resolve_model

SMALL = {"kv_cache_bytes": 1 << 22}


@pytest.fixture
def copy(folders: dict[str, Path], tmp_path: Path) -> Path:
    """A float32 checkpoint that a test may spoil."""
    return Path(shutil.copytree(folders["gqa1_untied"], tmp_path / "model"))


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_weights(folder: Path, **changes: torch.Tensor | None) -> None:
    path = folder / "model.safetensors"
    tensors = {**load_file(path), **changes}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)


@pytest.mark.parametrize("model", ["/no/such/folder", "./nothing", "~/nothing-here", "a/b/c"])
def test_a_path_without_a_folder_is_reported_at_once(model: str) -> None:
    """What looks like a path is never looked for on the hub."""
    started = time.monotonic()
    with pytest.raises(ModelNotFound, match="there is no folder"):
        Engine(EngineConfig(model))
    assert time.monotonic() - started < 1


def test_a_folder_without_a_config_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"holds no config\.json"):
        Engine(EngineConfig(str(tmp_path)))


def test_a_hub_id_goes_to_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And comes back as a folder, or as ModelNotFound with the reason."""
    asked: list[tuple[str, Any]] = []

    def fetch(model: str, *, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        asked.append((model, allow_patterns))
        assert "original/*" in ignore_patterns  # the same weights once more
        if model == "no/net":
            raise OSError("no route")
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    assert resolve_model("Qwen/Qwen3-0.6B") == tmp_path
    assert not any(pattern.endswith((".py", ".bin", ".pt")) for pattern in asked[0][1])
    with pytest.raises(ModelNotFound, match="OSError: no route"):
        resolve_model("no/net")


def test_a_missing_shard_is_named(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(folders["gqa2_sharded"], tmp_path / "model"))
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(
        MissingWeights, match=r"1 of 3 .* missing: model-00002-of-00003\.safetensors"
    ):
        Engine(EngineConfig(str(folder), **SMALL))


def test_a_model_with_an_encoder_is_refused_by_that_name(copy: Path) -> None:
    """Not for a size that such models call otherwise."""
    change_config(copy, architectures=["T5ForConditionalGeneration"], is_encoder_decoder=True)
    with pytest.raises(UnsupportedModel, match=r"T5ForConditionalGeneration.* has an encoder"):
        Engine(EngineConfig(str(copy), **SMALL))


def test_an_lm_head_of_its_own_is_not_tied_away(copy: Path) -> None:
    """tie_word_embeddings says so, the file says otherwise: transformers believes the file."""
    prompt, params = [5, 9, 11], SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    with Engine(EngineConfig(str(copy), **SMALL)) as built:
        untied = built.generate([prompt], params)[0].token_ids
    change_config(copy, tie_word_embeddings=True)
    with Engine(EngineConfig(str(copy), **SMALL)) as built:
        assert built.generate([prompt], params)[0].token_ids == untied
    change_weights(copy, **{"lm_head.weight": None})
    with Engine(EngineConfig(str(copy), **SMALL)) as built:
        assert built.generate([prompt], params)[0].token_ids != untied


def test_a_missing_tensor_is_named(copy: Path) -> None:
    change_weights(copy, **{"model.layers.1.self_attn.k_proj.weight": None, "lm_head.weight": None})
    with pytest.raises(
        MissingWeights,
        match=r"2 tensors .*lm_head.weight, model.layers.1.self_attn.qkv_proj.weight",
    ):
        Engine(EngineConfig(str(copy), **SMALL))


def test_a_tensor_of_another_shape_is_named(copy: Path) -> None:
    """Also one that would broadcast."""
    change_weights(copy, **{"model.norm.weight": torch.ones(1)})
    with pytest.raises(
        WeightMismatch, match=r"'model.norm.weight' .* shape \[1\] found, \[48\] expected"
    ):
        Engine(EngineConfig(str(copy), **SMALL))


def test_a_tensor_without_a_place_is_named(copy: Path) -> None:
    change_weights(copy, **{"model.layers.0.self_attn.sinks": torch.ones(4)})
    with pytest.raises(WeightMismatch, match=r"'model.layers.0.self_attn.sinks', for which"):
        Engine(EngineConfig(str(copy), **SMALL))


def test_other_weight_formats_and_broken_files_are_not_read(copy: Path) -> None:
    path = copy / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(MissingWeights, match="no complete safetensors file"):
        Engine(EngineConfig(str(copy), **SMALL))
    path.rename(copy / "pytorch_model.bin")
    with pytest.raises(MissingWeights, match=r"holds no \.safetensors file"):
        Engine(EngineConfig(str(copy), **SMALL))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["RwkvForCausalLM"]}, "RwkvForCausalLM has a state .* Mamba2ForCaus"),
        (
            {"architectures": ["OtherForCausalLM"]},
            "'OtherForCausalLM' is not native; native are .*Qwen3",
        ),
        (
            {"quantization_config": {"quant_method": "hqq"}},
            "'hqq' are not supported; supported are fp8",
        ),
        ({"layer_types": ["full_attention", "linear_attention"]}, "type linear_attention"),
        ({"is_causal": False}, "attends to later tokens"),
        ({"rope_parameters": {"rope_type": "proportional"}}, "rope type 'proportional'"),
    ],
)
def test_a_model_that_is_not_supported_is_named(
    copy: Path, changes: dict[str, Any], message: str
) -> None:
    """Natively; most of these run through transformers otherwise."""
    change_config(copy, **changes)
    with pytest.raises(UnsupportedModel, match=message):
        Engine(EngineConfig(str(copy), model_path="native", **SMALL))


def test_a_config_without_a_needed_key_names_it(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    del config["vocab_size"]
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="has no 'vocab_size'"):
        Engine(EngineConfig(str(copy), **SMALL))
    (copy / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read as JSON"):
        Engine(EngineConfig(str(copy), **SMALL))


@pytest.mark.parametrize("content", [None, "{"])
def test_a_folder_without_a_tokenizer_says_so(copy: Path, content: str | None) -> None:
    """Missing, when transformers would make up an empty one, or broken."""
    (copy / "tokenizer.json").unlink()
    if content is not None:
        (copy / "tokenizer.json").write_text(content)
    with pytest.raises(
        ConfigError, match=r"holds none of tokenizer\.json|tokenizer in .* cannot be loaded"
    ):
        Engine(EngineConfig(str(copy), **SMALL))


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        ("config.json", {"vocab_size": "512"}, "vocab_size must be between 1 and"),
        ("config.json", {"num_attention_heads": 0, "head_dim": None}, "config.json"),
        ("config.json", {"rms_norm_eps": [1]}, "rms_norm_eps must be a number above 0"),
        ("config.json", {"architectures": 7}, "value of a wrong kind"),
        (
            "config.json",
            {"layer_types": ["full_attention"]},
            "layer_types has 1 entries for 3 layers",
        ),
        (
            "config.json",
            {"use_sliding_window": True, "max_window_layers": 0, "sliding_window": 0},
            "sliding_window must be between 1 and",
        ),
        (
            "config.json",
            {"rope_parameters": {"rope_type": "linear"}},
            "config.json has no 'factor'",
        ),
        (
            "config.json",
            {"rope_scaling": {"type": "linear", "factor": "2"}},
            "factor must be a number above 0",
        ),
        ("config.json", {"quantization_config": [1]}, "value of a wrong kind"),
        ("generation_config.json", {"eos_token_id": [[1]]}, "value of a wrong kind"),
        (
            "model.safetensors.index.json",
            {"weight_map": {"a": "../b"}},
            "files beside it, got '../b",
        ),
    ],
)
def test_a_hostile_model_folder_is_refused_by_name(
    folder: Path, tmp_path: Path, file: str, change: dict[str, Any], words: str
) -> None:
    made = tmp_path / "model"
    shutil.copytree(folder, made)
    content = json.loads((made / file).read_text()) if (made / file).exists() else {}
    (made / file).write_text(json.dumps(content | change))
    if file == INDEX:
        (made / "model.safetensors").unlink()  # which would go before an index
    with pytest.raises(ConfigError, match=words):
        Engine(EngineConfig(str(made), **SMALL))


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_file_that_is_far_too_large_or_deep_is_refused_by_name(
    folder: Path, tmp_path: Path, name: str
) -> None:
    made = tmp_path / "model"
    shutil.copytree(folder, made)
    (made / name).write_text("[" * 200_000)
    with pytest.raises(ConfigError):
        Engine(EngineConfig(str(made), **SMALL))
    with (made / name).open("r+b") as file:
        file.truncate(1 << 40)  # a hole: it takes no space
    with pytest.raises(ConfigError, match=f"{name} has {1 << 40} bytes"):
        Engine(EngineConfig(str(made), **SMALL))
