"""One small random checkpoint, or two, of each family of the native decoder, made to show a mistake."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.engine.checkpoints import VOCAB_SIZE, write_random

COMMON = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "dtype": "float32",
}


@dataclass(frozen=True)
class Family:
    """A checkpoint of transformers' `model_type`; values: of its configuration, beside those of COMMON."""

    name: str
    model_type: str
    values: Mapping[str, Any]


def rope(rope_type: str = "default", theta: float = 500.0, **parameters: Any) -> dict[str, Any]:
    """rope_parameters for a Family. So small a theta lets positions matter to the slow pairs too."""
    return {"rope_type": rope_type, "rope_theta": theta, **parameters}


LLAMA3 = rope(
    "llama3",
    factor=4.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
YARN = rope("yarn", factor=4.0, original_max_position_embeddings=64, beta_fast=8.0)
EXPERTS = {
    "rope_parameters": rope(),
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
}
DELTA = {
    "rope_parameters": rope(partial_rotary_factor=0.5),
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 12,
}
SHARED_EXPERT = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 24,
}
LINEAR_LAST = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
GEMMA = {"rope_parameters": rope(), "query_pre_attn_scalar": 40, "sliding_window": 20}
GEMMA3_LAYERS = {
    "rope_parameters": {
        "full_attention": rope("linear", theta=2_000.0, factor=4.0),
        "sliding_attention": rope(theta=100.0),
    },
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
}


def longrope(original: int, **values: Any) -> dict[str, Any]:
    """Values of a Phi-3 whose factors change beyond so many tokens. Its heads are hidden / heads wide."""
    num_pairs = int(16 * values.get("partial_rotary_factor", 1.0)) // 2
    parameters = rope(
        "longrope",
        short_factor=[1.0 + i / 4 for i in range(num_pairs)],
        long_factor=[2.0 + i / 2 for i in range(num_pairs)],
    )
    return {
        "hidden_size": 64,
        "original_max_position_embeddings": original,
        "rope_parameters": parameters,
        **values,
    }


FAMILIES = [
    Family("llama2", "llama", {"rope_parameters": rope(), "num_key_value_heads": 4}),
    Family(
        "llama3", "llama", {"rope_parameters": LLAMA3, "attention_bias": True, "mlp_bias": True}
    ),
    Family("mistral", "mistral", {"rope_parameters": rope(), "sliding_window": 20}),
    Family(
        "mistral_full",
        "mistral",
        {"rope_parameters": rope("dynamic", factor=2.0), "sliding_window": None},
    ),
    Family("qwen2", "qwen2", {"rope_parameters": YARN}),
    Family(
        "qwen2_windows",
        "qwen2",
        {
            "rope_parameters": rope("linear", factor=3.0),
            "use_sliding_window": True,
            "sliding_window": 33,
            "max_window_layers": 1,
        },
    ),
    Family(
        "qwen3",
        "qwen3",
        {"rope_parameters": rope(), "attention_bias": True, "tie_word_embeddings": True},
    ),
    Family("phi3", "phi3", {"rope_parameters": rope(), "sliding_window": 24}),
    Family("phi3_longrope", "phi3", longrope(original=256, partial_rotary_factor=0.75)),
    Family("phi3_longrope_beyond", "phi3", longrope(original=9)),
    Family("olmo2", "olmo2", {"rope_parameters": rope()}),
    Family(
        "gemma2", "gemma2", {**GEMMA, "attn_logit_softcapping": 4.0, "final_logit_softcapping": 3.0}
    ),
    Family("gemma3", "gemma3_text", {**GEMMA, **GEMMA3_LAYERS}),
    Family(
        "seed_oss",
        "seed_oss",
        {"rope_parameters": rope(), "attention_bias": True, "mlp_bias": True},
    ),
    Family("mixtral", "mixtral", {"rope_parameters": rope(), "num_local_experts": 5}),
    Family(
        "mixtral_window",
        "mixtral",
        {
            "rope_parameters": rope(),
            "num_local_experts": 4,
            "num_experts_per_tok": 3,
            "sliding_window": 20,
        },
    ),
    Family("qwen3_moe", "qwen3_moe", {**EXPERTS, "norm_topk_prob": True}),
    Family(
        "qwen3_moe_mixed",
        "qwen3_moe",
        {
            **EXPERTS,
            "attention_bias": True,
            "mlp_only_layers": [1],
            "decoder_sparse_step": 2,
            "num_hidden_layers": 4,
        },
    ),
    Family("qwen3_5", "qwen3_5_text", {**DELTA, **LINEAR_LAST}),
    Family(
        "qwen3_5_interval",
        "qwen3_5_text",
        {
            **DELTA,
            "num_hidden_layers": 4,
            "full_attention_interval": 2,
            "linear_num_value_heads": 2,
            "linear_conv_kernel_dim": 3,
            "attention_bias": True,
        },
    ),
    Family("qwen3_5_moe", "qwen3_5_moe_text", {**DELTA, **LINEAR_LAST, **SHARED_EXPERT}),
    Family(
        "qwen3_next",
        "qwen3_next",
        {**DELTA, **LINEAR_LAST, **SHARED_EXPERT, "mlp_only_layers": [0]},
    ),
    Family(
        "gpt_oss",
        "gpt_oss",
        {
            "rope_parameters": {**YARN, "truncate": False},
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "sliding_window": 20,
            "swiglu_limit": 1.5,
        },
    ),
]
BY_NAME = {family.name: family for family in FAMILIES}


def make_family(folder: Path, family: Family) -> Path:
    """Write a random float32 checkpoint with its tokenizer; return its folder."""
    torch.manual_seed(len(family.name))
    config = AutoConfig.for_model(family.model_type, **{**COMMON, **family.values})
    return write_random(AutoModelForCausalLM.from_config(config), folder)
