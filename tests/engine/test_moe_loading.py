"""Experts out of a checkpoint: in one tensor or each by itself, a rank's share of them, and what is amiss."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine import Engine
from engine.checkpoint.model_config import read_model_config
from engine.checkpoint.weights import CheckpointTensor
from engine.errors import ConfigError, MissingWeights, WeightMismatch
from engine.layers.parallel import TensorParallel
from engine.run.forward.model_runner import ModelRunner
from tests.engine.families import BY_NAME, make_family
from tests.engine.family_runs import config_of, reference_of, run

Tensors = dict[str, Tensor]
QWEN_EXPERTS, MIXTRAL_EXPERTS = (
    "model.layers.0.mlp.experts",
    "model.layers.0.block_sparse_moe.experts",
)


def rewrite(folder: Path, change: Callable[[Tensors], Tensors]) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file(change(tensors), folder / "model.safetensors", metadata={"format": "pt"})


def fuse(tensors: Tensors) -> Tensors:
    """Each layer's experts in two tensors, as transformers 5 holds them in memory, with its names."""
    names = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
    fused, matrices = {}, {}
    for name, tensor in tensors.items():
        layer, found, rest = name.replace("block_sparse_moe", "mlp").partition(".experts.")
        if found:
            expert, matrix, _ = rest.split(".")
            matrices[layer, names.get(matrix, matrix), int(expert)] = tensor
        else:
            fused[name.replace("block_sparse_moe", "mlp")] = tensor
    for layer in {layer for layer, _, _ in matrices}:
        gate, up, down = (
            torch.stack([matrices[key] for key in sorted(matrices) if key[:2] == (layer, matrix)])
            for matrix in ("gate_proj", "up_proj", "down_proj")
        )
        fused[f"{layer}.experts.gate_up_proj"] = torch.cat((gate, up), dim=1)
        fused[f"{layer}.experts.down_proj"] = down
    return fused


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_experts_in_one_tensor_give_the_same_tokens(name: str, tmp_path: Path) -> None:
    reference = reference_of(tmp_path, BY_NAME[name])
    assert reference.answers
    before = set(load_file(tmp_path / "model.safetensors"))
    rewrite(tmp_path, fuse)
    assert len(before) > len(load_file(tmp_path / "model.safetensors"))
    assert run(reference)[0] == []


def test_a_rank_reads_only_its_share_of_the_experts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, read_whole = make_family(tmp_path, BY_NAME["gpt_oss"]), set()
    whole = CheckpointTensor.whole

    def recorded(tensor: CheckpointTensor) -> Tensor:
        read_whole.add(tensor.name)
        return whole(tensor)

    monkeypatch.setattr(CheckpointTensor, "whole", recorded)
    ModelRunner(config_of(folder), read_model_config(folder), folder, TensorParallel(1, 2))
    norms = {
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
        "weight",
    }  # the last: the model's
    others = {"mlp.router.weight", "mlp.router.bias", "self_attn.o_proj.bias"}
    assert {name.split(".", 3)[-1] for name in read_whole} == norms | others


@pytest.mark.parametrize(
    ("name", "values", "said"),
    [
        ("qwen3_moe", {"num_experts_per_tok": 9}, "a token cannot go through 9 of 8 experts"),
        (
            "qwen3_moe",
            {"mlp_only_layers": [3]},
            r"mlp_only_layers must hold numbers of the 3 layers, got \[3\]",
        ),
        (
            "mixtral",
            {"hidden_act": "gelu_pytorch_tanh"},
            "experts with hidden_act 'gelu_pytorch_tanh' are not",
        ),
        ("gpt_oss", {"swiglu_limit": None}, "swiglu_limit must be a number above 0, got None"),
    ],
)
def test_a_value_that_experts_cannot_have_is_named(
    name: str, values: dict[str, Any], said: str, tmp_path: Path
) -> None:
    config = make_family(tmp_path, BY_NAME[name]) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | values))
    with pytest.raises(ConfigError, match=said):
        Engine(replace(config_of(tmp_path), model_path="native"))


def without(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {key: tensor for key, tensor in tensors.items() if key != name}


@pytest.mark.parametrize(
    ("name", "missing", "said"),
    [
        ("qwen3_moe", f"{QWEN_EXPERTS}.3.up_proj.weight", r"mlp\.experts\.gate_up_proj \(3\.up\)"),
        ("mixtral", f"{MIXTRAL_EXPERTS}.2.w2.weight", r"mlp\.experts\.down_proj \(2\.down\)"),
        ("gpt_oss", f"{QWEN_EXPERTS}.down_proj_bias", r"mlp\.experts\.down_proj_bias"),
    ],
)
def test_a_missing_tensor_is_named(name: str, missing: str, said: str, tmp_path: Path) -> None:
    rewrite(make_family(tmp_path, BY_NAME[name]), without(missing))
    with pytest.raises(MissingWeights, match=rf"lacks 1 tensors the model needs: .*{said}"):
        Engine(config_of(tmp_path))


@pytest.mark.parametrize(
    ("name", "extra"),
    [
        ("qwen3_moe", f"{QWEN_EXPERTS}.8.up_proj.weight"),
        ("qwen3_moe", f"{QWEN_EXPERTS}.3.up_proj.bias"),
        ("mixtral", "model.layers.0.self_attn.sinks"),
    ],
)
def test_a_tensor_without_a_place_is_named(name: str, extra: str, tmp_path: Path) -> None:
    rewrite(
        make_family(tmp_path, BY_NAME[name]), lambda tensors: tensors | {extra: torch.ones(2, 2)}
    )
    with pytest.raises(WeightMismatch, match=f"holds '{extra}', for which this model has no place"):
        Engine(config_of(tmp_path))
