"""The architectures of the native decoder, and how each differs from Llama.

To add one: an entry here, and a line in tests/engine/families.py for the comparison with transformers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from engine.errors import UnsupportedModel


class Norms(NamedTuple):
    """The names of a layer's norms in the checkpoint, by place; None for a norm that it lacks."""

    before_attention: str | None
    after_attention: str | None
    before_mlp: str | None
    after_mlp: str | None


BEFORE = Norms("input_layernorm", None, "post_attention_layernorm", None)
AFTER = Norms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
AROUND = Norms(
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)


@dataclass(frozen=True)
class DecoderFlags:
    """The differences of one Llama-like architecture from another.

    model_type: the model_type in config.json. transformers chooses the model by it, not by `architectures`.
    keys: the keys of config.json that the architecture reads besides COMMON_KEYS, each with the value that a missing
        key stands for. decoder_config.py says what each does. Other keys are ignored, as transformers ignores them.
    fixed: values by key, which hold whatever config.json says.
    refused: keys that make transformers build another model from config.json.
    norms: where a layer normalises. After attention or MLP it normalises their output, before that output joins the
        residual stream.
    norm_offset: is added to the norm weights of the checkpoint.
    float32_norms: norm weights multiply before the result is rounded to the model's dtype, not after.
    float32_rotation: cosines and sines are not rounded to the model's dtype.
    qk_norm: queries and keys are normalised before the rotation, each head by itself or all as one vector.
    gated_attention: the output of each head is multiplied by the sigmoid of a gate.
    qkv_bias: queries, keys and values have a bias whatever config.json says.
    scaled_embeddings: embeddings are multiplied by the square root of the hidden size.
    sinks: every head has an attention sink, see AttentionFeatures.
    expert_bias, interleaved_experts: see `bias` and `interleaved` of Experts.
    interleaved_delta: see `interleaved` of DeltaHeads.
    """

    model_type: str
    keys: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    refused: Sequence[str] = ()
    norms: Norms = BEFORE
    norm_offset: float = 0.0
    float32_norms: bool = False
    float32_rotation: bool = False
    qk_norm: Literal["head", "whole"] | None = None
    gated_attention: bool = False
    qkv_bias: bool = False
    scaled_embeddings: bool = False
    sinks: bool = False
    expert_bias: bool = False
    interleaved_experts: bool = False
    interleaved_delta: bool = False


QWEN_WINDOWS = {
    "layer_types": None,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
GEMMA = {
    "attention_bias": False,
    "hidden_activation": "gelu_pytorch_tanh",
    "layer_types": None,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
DELTA = {
    "attention_bias": False,
    "full_attention_interval": 4,
    "layer_types": None,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "partial_rotary_factor": 0.25,
}
SHARED_EXPERT = {
    "moe_intermediate_size": 512,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_local_experts": None,
    "shared_expert_intermediate_size": 512,
}
QWEN3_5 = DecoderFlags(
    "qwen3_5_text",
    keys=DELTA,
    norm_offset=1.0,
    float32_norms=True,
    qk_norm="head",
    gated_attention=True,
)

ARCHITECTURES = {
    "LlamaForCausalLM": DecoderFlags("llama", keys={"attention_bias": False, "mlp_bias": False}),
    "MistralForCausalLM": DecoderFlags(
        "mistral", keys={"sliding_window": 4096}, refused=("layer_types",)
    ),
    "Qwen2ForCausalLM": DecoderFlags("qwen2", keys=QWEN_WINDOWS, qkv_bias=True),
    "Qwen3ForCausalLM": DecoderFlags(
        "qwen3", keys={"attention_bias": False, **QWEN_WINDOWS}, qk_norm="head"
    ),
    "Phi3ForCausalLM": DecoderFlags(
        "phi3",
        keys={
            "original_max_position_embeddings": 4096,
            "partial_rotary_factor": 1.0,
            "sliding_window": None,
        },
    ),
    "Olmo2ForCausalLM": DecoderFlags(
        "olmo2",
        keys={"attention_bias": False},
        norms=AFTER,
        float32_norms=True,
        float32_rotation=True,
        qk_norm="whole",
    ),
    "Gemma2ForCausalLM": DecoderFlags(
        "gemma2",
        keys={**GEMMA, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        fixed={"sliding_window_pattern": 2},
        norms=AROUND,
        norm_offset=1.0,
        float32_norms=True,
        scaled_embeddings=True,
    ),
    "Gemma3ForCausalLM": DecoderFlags(
        "gemma3_text",
        keys={
            **GEMMA,
            "final_logit_softcapping": None,
            "rope_local_base_freq": 10_000.0,
            "rope_theta": 1_000_000.0,
            "sliding_window_pattern": 6,
        },
        norms=AROUND,
        norm_offset=1.0,
        float32_norms=True,
        qk_norm="head",
        scaled_embeddings=True,
    ),
    "SeedOssForCausalLM": DecoderFlags(
        "seed_oss", keys={"attention_bias": True, "attention_out_bias": False, "mlp_bias": False}
    ),
    "MixtralForCausalLM": DecoderFlags(
        "mixtral",
        keys={
            "num_experts_per_tok": 2,
            "num_local_experts": 8,
            "rope_theta": 1_000_000.0,
            "sliding_window": None,
        },
    ),
    "Qwen3MoeForCausalLM": DecoderFlags(
        "qwen3_moe",
        keys={
            "attention_bias": False,
            "decoder_sparse_step": 1,
            "mlp_only_layers": None,
            "moe_intermediate_size": 768,
            "norm_topk_prob": False,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_local_experts": None,
            "sliding_window": 4096,
            "use_sliding_window": False,
        },
        qk_norm="head",
    ),
    "Qwen3_5ForCausalLM": QWEN3_5,
    "Qwen3_5MoeForCausalLM": replace(
        QWEN3_5,
        model_type="qwen3_5_moe_text",
        keys={**DELTA, **SHARED_EXPERT, "num_experts": 256, "num_experts_per_tok": 8},
    ),
    "Qwen3NextForCausalLM": replace(
        QWEN3_5,
        model_type="qwen3_next",
        keys={
            **DELTA,
            **SHARED_EXPERT,
            "decoder_sparse_step": 1,
            "mlp_only_layers": None,
            "norm_topk_prob": True,
        },
        interleaved_delta=True,
    ),
    "GptOssForCausalLM": DecoderFlags(
        "gpt_oss",
        keys={
            "attention_bias": True,
            "layer_types": None,
            "num_experts_per_tok": 4,
            "num_local_experts": 128,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
            "rope_theta": 150_000.0,
            "sliding_window": 128,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
        },
        fixed={"sliding_window_pattern": 2},
        float32_norms=True,
        sinks=True,
        expert_bias=True,
        interleaved_experts=True,
    ),
}


#: The same models without an LM head, as checkpoints for embeddings name them, and their names with one.
BODIES = {name.replace("ForCausalLM", "Model"): name for name in ARCHITECTURES} | {
    "Gemma3TextModel": "Gemma3ForCausalLM",
    "Qwen3_5TextModel": "Qwen3_5ForCausalLM",
    "Qwen3_5MoeTextModel": "Qwen3_5MoeForCausalLM",
}
for with_images in ("Gemma3Model", "Qwen3_5Model", "Qwen3_5MoeModel"):
    del BODIES[with_images]


def decoder_flags(architecture: str) -> DecoderFlags:
    """Return the flags that make the decoder this architecture. Raises UnsupportedModel."""
    architecture = BODIES.get(architecture, architecture)
    if architecture not in ARCHITECTURES:
        raise UnsupportedModel(
            f"architecture {architecture!r} is not native; native are {', '.join(sorted(ARCHITECTURES))}"
        )
    return ARCHITECTURES[architecture]
