"""What `quantization_config` may say: values, groups of modules, and what is not built."""

from __future__ import annotations

from typing import Any

import pytest

from engine import (
    ConfigError,
    UnsupportedModel,
)
from engine.checkpoint.quantization import Quantization, read_quantization

MODULE = "model.layers.1.mlp.down_proj"
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128}


def ct(form: str = "pack-quantized", **weights: Any) -> dict[str, Any]:
    values = {
        "num_bits": 4,
        "type": "int",
        "strategy": "group",
        "group_size": 32,
        "symmetric": True,
        **weights,
    }
    group = {"targets": ["Linear"], "weights": values}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}


@pytest.mark.parametrize(
    ("quantization_config", "message"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "'bitsandbytes' are not supported"),
        ({"bits": 4}, "quant_method None are not supported; supported are fp8"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt 'e5m2'"),
        ({"quant_method": "fp8", "expert_dtype": "fp4"}, "expert_dtype 'fp4'"),
        (GPTQ | {"bits": 3}, "bits 3 is not supported; supported: 4, 8"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        (GPTQ | {"dynamic": {"+:.*down.*": {"bits": 8}}}, "dynamic .*down"),
        (AWQ | {"version": "gemv"}, "version 'gemv'"),
        (AWQ | {"bits": 8}, "bits 8 is not supported; supported: 4"),
        (AWQ | {"zero_point": False}, "zero_point False"),
        (ct("marlin-24"), "'marlin-24'"),
        (ct("nvfp4-pack-quantized", type="float"), "'nvfp4-pack-quantized'"),
        (ct(num_bits=3), "int3 weights in format 'pack-quantized'"),
        (ct("float-quantized", type="float", num_bits=8), "strategy 'group'"),
        (ct(dynamic=True), "dynamic True"),
        (ct() | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        (ct() | {"transform_config": {"config_groups": {"R1": {"type": "hadamard"}}}}, "transform_config"),
    ],
)
def test_what_is_not_built_is_refused_by_name(quantization_config: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        read_quantization({"quantization_config": quantization_config})


@pytest.mark.parametrize(
    "quantization_config",
    [
        [1],
        GPTQ | {"group_size": "many"},
        {"quant_method": "fp8", "weight_block_size": [128, 0]},
        {"quant_method": "fp8", "weight_block_size": 128},
        {"quant_method": "compressed-tensors"},
        ct() | {"config_groups": {"group_0": {"targets": ["re:("], "weights": {"num_bits": 4}}}},
        GPTQ | {"dynamic": [1]},
    ],
)
def test_values_of_a_wrong_kind_are_named(quantization_config: Any) -> None:
    with pytest.raises(ConfigError, match="quantization_config"):
        read_quantization({"quantization_config": quantization_config})


def test_groups_of_modules_are_found_by_name_before_pattern_before_class() -> None:
    groups = {
        "a": {"targets": ["Linear"], "weights": ct()["config_groups"]["group_0"]["weights"]},
        "b": {
            "targets": ["re:.*down_proj$"],
            "weights": ct(group_size=64)["config_groups"]["group_0"]["weights"],
        },
        "c": {"targets": ["lm_head"], "weights": ct(group_size=8)["config_groups"]["group_0"]["weights"]},
    }
    quantization = read_quantization({"quantization_config": ct() | {"config_groups": groups}})
    assert isinstance(quantization, Quantization)
    sizes = {}
    for module in ("lm_head", MODULE, "model.layers.0.self_attn.q_proj"):
        scheme = quantization.scheme_of(module)
        assert scheme is not None
        sizes[module.rpartition(".")[2]] = scheme.block[1]
    assert sizes == {"lm_head": 8, "down_proj": 64, "q_proj": 32}
    only = read_quantization({"quantization_config": ct() | {"config_groups": {"c": groups["c"]}}})
    assert only is not None
    assert only.scheme_of(MODULE) is None
