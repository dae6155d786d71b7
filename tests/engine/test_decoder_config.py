"""The decoder reads of config.json what transformers reads, with the keys that the hub's files have."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, Phi3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine.checkpoint.model_config import ModelConfig, read_model_config
from engine.errors import UnsupportedModel
from engine.layers.rotary import SCALINGS, Rope, RotaryEmbedding, apply_rotary
from engine.models.decoder_config import DecoderConfig, read_decoder_config
from engine.models.registry import decoder_flags

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-05,
    "vocab_size": 512,
    "max_position_embeddings": 8192,
    "pad_token_id": 0,
    "eos_token_id": 2,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3"}
PHI4_FACTORS = {"short_factor": [1.0] * 6, "long_factor": [1.0, 1.1, 1.3, 1.9, 2.6, 3.5]}
QWEN = {"sliding_window": 128, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0}

#: By the checkpoint whose config.json has these keys; the sizes are small.
HUB: dict[str, dict[str, Any]] = {
    "Llama-3.1-8B": {
        "model_type": "llama",
        "rope_scaling": {**LLAMA3, "original_max_position_embeddings": 1024},
        "rope_theta": 500000.0,
        "attention_bias": False,
        "mlp_bias": False,
    },
    "Mistral-7B-v0.1": {"model_type": "mistral", "sliding_window": 4096},
    "Qwen2.5-0.5B": {
        "model_type": "qwen2",
        **QWEN,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "max_window_layers": 5,
    },
    "Qwen2-with-windows-and-YaRN": {
        "model_type": "qwen2",
        **QWEN,
        "use_sliding_window": True,
        "max_window_layers": 5,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048},
    },
    "Phi-4-mini": {
        "model_type": "phi3",
        "partial_rotary_factor": 0.75,
        "sliding_window": 4000,
        "original_max_position_embeddings": 512,
        "rope_scaling": {"type": "longrope", **PHI4_FACTORS},
        "tie_word_embeddings": True,
    },
    "gemma-2-2b": {
        "model_type": "gemma2",
        "head_dim": 16,
        "rms_norm_eps": 1e-06,
        "hidden_act": "gelu_pytorch_tanh",
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "query_pre_attn_scalar": 224,
        "sliding_window": 4096,
        "rope_theta": 10000.0,
    },
    "gemma-3-1b-it": {
        "model_type": "gemma3_text",
        "num_key_value_heads": 1,
        "head_dim": 16,
        "rms_norm_eps": 1e-06,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "rope_local_base_freq": 10000,
        "rope_theta": 1000000,
        "rope_scaling": None,
    },
    "gemma-3-12b, its text part": {
        "model_type": "gemma3_text",
        "num_key_value_heads": 1,
        "head_dim": 16,
        "rms_norm_eps": 1e-06,
        "sliding_window": 1024,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    },
}


def ours(folder: Path, values: dict[str, Any]) -> DecoderConfig:
    """As the engine reads config.json, whose architecture follows from the type."""
    config_class = type(AutoConfig.for_model(values["model_type"]))
    architecture = AutoModelForCausalLM._model_mapping[config_class].__name__
    (folder / "config.json").write_text(json.dumps({**values, "architectures": [architecture]}))
    model = read_model_config(folder)
    return read_decoder_config(model, decoder_flags(model.architecture))


@pytest.mark.parametrize("name", HUB)
def test_the_same_model_is_read(name: str, tmp_path: Path) -> None:
    """Windows, rotations, scales, caps, biases and ties of each layer."""
    values = {**SIZES, **HUB[name]}
    read = ours(tmp_path, values)
    with torch.device("meta"):
        config = AutoConfig.for_model(**values)
        theirs = AutoModelForCausalLM.from_config(config)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    windowed = getattr(config, "sliding_window", None)
    assert [layer.window for layer in read.layers] == [
        windowed if kind == "sliding_attention" else None for kind in kinds
    ]
    attention, mlp = theirs.model.layers[0].self_attn, theirs.model.layers[0].mlp
    assert read.attention_scale == attention.scaling
    assert read.attention_soft_cap == getattr(config, "attn_logit_softcapping", None)
    assert read.logit_soft_cap == getattr(config, "final_logit_softcapping", None)
    assert read.qkv_bias == (getattr(attention, "q_proj", attention.o_proj).bias is not None)
    assert read.output_bias == (attention.o_proj.bias is not None)
    assert read.mlp_bias == (mlp.down_proj.bias is not None)
    assert read.tie_word_embeddings == config.tie_word_embeddings
    assert read.flags.scaled_embeddings == hasattr(theirs.model.embed_tokens, "embed_scale")
    rotary = type(theirs.model.rotary_emb)(config)
    for layer, kind in zip(read.layers, kinds, strict=True):
        of_kind = f"{kind}_" if hasattr(rotary, f"{kind}_inv_freq") else ""
        frequencies, factor = read.ropes[layer.rope].frequencies(longest=100)
        assert torch.equal(frequencies, getattr(rotary, f"{of_kind}inv_freq"))
        assert factor == getattr(rotary, f"{of_kind}attention_scaling")


@pytest.mark.parametrize(
    ("architecture", "changes", "named"),
    [
        (
            "MistralForCausalLM",
            {"model_type": "mistral", "layer_types": ["full_attention"] * 7},
            "layer_types",
        ),
        ("LlamaForCausalLM", {"model_type": "mistral"}, "model_type 'mistral'"),
    ],
)
def test_what_transformers_takes_for_another_model_is_not_native(
    tmp_path: Path, architecture: str, changes: dict[str, Any], named: str
) -> None:
    """It goes by model_type, and takes a Mistral with types of layers for a Ministral."""
    model = read_written(tmp_path, architecture, changes)
    with pytest.raises(UnsupportedModel, match=named):
        read_decoder_config(model, decoder_flags(architecture))


def read_written(folder: Path, architecture: str, changes: dict[str, Any]) -> ModelConfig:
    values = {**SIZES, "architectures": [architecture], **changes}
    (folder / "config.json").write_text(json.dumps(values))
    return read_model_config(folder)


ORIGINAL = {"original_max_position_embeddings": 1024}
FACTORS = {
    "short_factor": [1.0 + i / 10 for i in range(24)],
    "long_factor": [1.5 + i / 3 for i in range(24)],
}
CASES: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 8.0},
    {"rope_type": "dynamic", "factor": 3.0},
    {"rope_type": "yarn", "factor": 4.0, **ORIGINAL},
    {
        "rope_type": "yarn",
        "factor": 40,
        "mscale": 1.2,
        "mscale_all_dim": 0.8,
        "beta_fast": 8,
        **ORIGINAL,
    },
    {"rope_type": "yarn", "factor": 2.5, "attention_factor": 1.5, "truncate": False, **ORIGINAL},
    {"rope_type": "longrope", "factor": 2.0, "attention_factor": 1.25, **FACTORS, **ORIGINAL},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        **ORIGINAL,
    },
]


@pytest.mark.parametrize("longest", [512, 1024, 1025, 4096])
@pytest.mark.parametrize("theta", [10_000.0, 500_000.0, 70.0])
@pytest.mark.parametrize("case", CASES)
def test_frequencies_equal_transformers(case: dict[str, Any], theta: float, longest: int) -> None:
    config = LlamaConfig(
        hidden_size=192,
        num_attention_heads=4,
        max_position_embeddings=4096,
        rope_parameters={**case, "rope_theta": theta},
    )
    expected, expected_factor = ROPE_INIT_FUNCTIONS[case["rope_type"]](
        config, torch.device("cpu"), longest
    )
    frequencies, factor = Rope(case["rope_type"], 48, theta, 4096, case).frequencies(longest)
    assert torch.equal(frequencies, expected)
    assert factor == expected_factor


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("kind_name", ["rope_type", "type"])
def test_yarn_stretches_the_length_that_it_starts_from(
    tmp_path: Path, key: str, kind_name: str
) -> None:
    """Qwen3's recipe leaves max_position_embeddings at 40,960, and means 131,072."""
    yarn = {kind_name: "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    values = {
        **SIZES,
        "model_type": "qwen3",
        "head_dim": 16,
        "rope_theta": 1e6,
        "max_position_embeddings": 40960,
        key: yarn,
    }
    model = read_written(tmp_path, "Qwen3ForCausalLM", values)
    assert model.max_position_embeddings == 131072
    [rope] = read_decoder_config(model, decoder_flags("Qwen3ForCausalLM")).ropes
    expected, expected_factor = ROPE_INIT_FUNCTIONS["yarn"](
        AutoConfig.for_model(**values), torch.device("cpu")
    )
    frequencies, factor = rope.frequencies(131072)
    assert torch.equal(frequencies, expected)
    assert factor == expected_factor


@pytest.mark.parametrize(
    ("changes", "length"),
    [
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, 131072),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6}}, 131072),
        (
            {
                "rope_scaling": {
                    "type": "yarn",
                    "factor": 4,
                    "original_max_position_embeddings": 32768.0,
                }
            },
            131072,
        ),
        (
            {
                "rope_scaling": {"type": "yarn", "factor": 8.0},
                "original_max_position_embeddings": 8192,
            },
            65536,
        ),
        (
            {
                "rope_scaling": {"type": "yarn", "factor": 2.0},
                "original_max_position_embeddings": 8192,
            },
            32768,
        ),
    ],
    ids=str,
)
def test_yarn_starts_from_the_length_that_transformers_takes(
    tmp_path: Path, changes: dict[str, Any], length: int
) -> None:
    """Without an original length it is max_position_embeddings, and the frequencies are computed from it too."""
    values = {
        **SIZES,
        "model_type": "qwen2",
        "head_dim": 16,
        "max_position_embeddings": 32768,
        **changes,
    }
    model = read_written(tmp_path, "Qwen2ForCausalLM", values)
    assert model.max_position_embeddings == length
    [rope] = read_decoder_config(model, decoder_flags("Qwen2ForCausalLM")).ropes
    expected, _ = ROPE_INIT_FUNCTIONS["yarn"](AutoConfig.for_model(**values), torch.device("cpu"))
    assert torch.equal(rope.frequencies(length)[0], expected)


def test_yarn_of_one_type_of_layers_stretches_the_length(tmp_path: Path) -> None:
    full = {
        "rope_type": "yarn",
        "factor": 4.0,
        "rope_theta": 1e6,
        "original_max_position_embeddings": 32768,
    }
    by_kind = {
        "full_attention": full,
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    changes = {"max_position_embeddings": 32768, "rope_parameters": by_kind}
    assert read_written(tmp_path, "Gemma3ForCausalLM", changes).max_position_embeddings == 131072


def test_a_length_that_is_stretched_already_is_stretched_once(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}
    model = read_written(
        tmp_path, "Qwen3ForCausalLM", {"max_position_embeddings": 163840, "rope_scaling": yarn}
    )
    assert model.max_position_embeddings == 163840


def test_every_kind_of_transformers_is_computed_or_named() -> None:
    """What it may learn next is refused until it is built: the set is no smaller than its own."""
    assert {case["rope_type"] for case in CASES} | {"default"} == set(SCALINGS)
    assert set(ROPE_INIT_FUNCTIONS) - set(SCALINGS) <= {"proportional"}


def test_a_part_of_each_head_turns() -> None:
    """As transformers turns it, Phi-3's partial rotation, with the magnitude of the longrope kind."""
    from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding, apply_rotary_pos_emb

    parameters = {
        "rope_type": "longrope",
        "short_factor": [1.0, 1.5, 2.0],
        "long_factor": [2.0, 3.0, 4.0],
    }
    config = Phi3Config(
        hidden_size=32,
        num_attention_heads=4,
        max_position_embeddings=256,
        original_max_position_embeddings=64,
        rope_parameters={**parameters, "rope_theta": 100.0, "partial_rotary_factor": 0.75},
        pad_token_id=0,
    )
    rope = Rope("longrope", 6, 100.0, 256, {**parameters, "original_max_position_embeddings": 64})
    query, key = torch.randn(2, 40, 4, 8, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(40)
    expected = apply_rotary_pos_emb(
        query[None],
        key[None],
        *Phi3RotaryEmbedding(config)(query, positions[None]),
        unsqueeze_dim=2,
    )
    rotary = RotaryEmbedding(rope, 64, dtype=torch.float32, device=torch.device("cpu"))
    for heads, turned in zip((query, key), expected, strict=True):
        torch.testing.assert_close(
            apply_rotary(heads, *rotary(positions)), turned[0], rtol=0, atol=1e-6
        )
