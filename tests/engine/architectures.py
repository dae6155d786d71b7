"""A small random checkpoint of each architecture that was tried through transformers: served, and refused."""

import json
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import engine.attention.kv_cache
from engine import Engine, EngineConfig, EngineStats
from engine.run.forward.model_runner import ModelRunner
from tests.engine.checkpoints import write_random
from tests.engine.families import COMMON, Family, rope
from tests.engine.family_runs import BLOCK_SIZE, NUM_NEW_TOKENS, config_of, prompts, run
from tests.engine.reference import Reference

#: Beside COMMON, as far as an architecture knows the names.
MORE = {
    "sliding_window": 20,
    "use_sliding_window": True,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
}
LATENT = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "head_dim": 8,
    "num_key_value_heads": 4,
}
SLIDING_FULL = ("sliding_attention", "full_attention")
BY_LAYER = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 512}
GEMMA4 = {
    "layer_types": ["sliding_attention", *SLIDING_FULL],
    "per_layer_config": {"02": {"head_dim": 32}},
    "rope_parameters": {
        "sliding_attention": rope(theta=100.0),
        "full_attention": rope("proportional", theta=2_000.0, partial_rotary_factor=0.25),
    },
    "num_experts": None,
    "moe_intermediate_size": None,
}
HALVES = {
    "init_std": 1.5,
    **{
        f"{half}_{name}": size
        for half in ("encoder", "decoder")
        for name, size in {"layers": 2, "attention_heads": 4, "ffn_dim": 96}.items()
    },
}
NO_ENCODER = {"is_decoder": True, "initializer_range": 1.5}
ROPES = {
    "rope_parameters": {
        "full_attention": rope(theta=2_000.0),
        "sliding_attention": rope(theta=100.0),
    }
}


def as_they_are(names: str) -> dict[str, dict[str, Any]]:
    """Architectures that take COMMON and MORE without values of their own."""
    return {name: {} for name in names.split()}


SERVED: dict[str, dict[str, Any]] = {
    **as_they_are("""
    afmoe apertus arcee aria_text beam biogpt bitnet bloom cohere cohere2 cohere2_moe ctrl diffllama ernie4_5
    ernie4_5_moe exaone4 exaone_moe flex_olmo flint gemma gemma3_text glm glm4 glm4_moe gpt2 gpt_bigcode
    gpt_neox gpt_oss granite granite_swa granitemoe granitemoe_swa granitemoeshared hrm_text
    hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax jais2 jetmoe kolibri1 laguna llama mellum
    mimo_v2_flash minimax_m2 ministral ministral3 mistral mixtral mpt nanochat nemotron olmo olmo2 olmo3 olmoe
    persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3 solar_open starcoder2
    vaultgemma
    """),
    **dict.fromkeys(("bert", "bert-generation", "ernie", "roc_bert"), NO_ENCODER),
    **dict.fromkeys(
        ("bart", "blenderbot", "blenderbot-small", "marian", "mbart", "pegasus", "whisper"), HALVES
    ),
    "axk1": LATENT,
    "cohere_compass_text": ROPES,
    "cwm": {"bos_token_id": 1},
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "dots1": {"first_k_dense_replace": 1, "n_shared_experts": 1},
    "falcon": {"head_dim": None, "alibi": True},
    "electra": {**NO_ENCODER, "embedding_size": 48},
    "gemma2": {"attn_logit_softcapping": 5.0},
    "gemma3n_text": {
        "num_hidden_layers": 5,
        "intermediate_size": [96] * 5,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", *SLIDING_FULL],
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.9, 0.5, 0.0, 0.0, 0.0],
        "laurel_rank": 8,
        **BY_LAYER,
    },
    "gemma4_text": {**GEMMA4, **BY_LAYER},
    "gemma4_unified_text": {**GEMMA4, "hidden_size_per_layer_input": None},
    "glm4_moe_lite": LATENT,
    "helium": {"head_dim": 12},
    "llama4_text": {"attention_chunk_size": 32, "floor_scale": 4, "no_rope_layers": [1, 0, 1]},
    "longcat_flash": LATENT,
    "minicpm3": LATENT,
    "modernbert-decoder": {"bos_token_id": 1},
    "plbart": {**HALVES, "scale_embedding": False},
    "opt": {"word_embed_proj_dim": 48, "init_std": 0.2},
    "stablelm": {"hidden_size": 64},
    "youtu": LATENT,
}
#: Short and wide enough to be quick: transformers computes the delta rule in chunks of 64.
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 12,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 12, "mamba_d_state": 16, "mamba_chunk_size": 32}
NO_ATTENTION = {"max_position_embeddings": 512, "num_attention_heads": 4}
#: Served with states beside the cache.
WITH_STATES: dict[str, dict[str, Any]] = {
    **as_they_are("lfm3"),
    "bailing_hybrid": {**LATENT, "head_dim": 16, "layer_group_size": 2},
    "bamba": {**MAMBA2, "attn_layer_indices": [1]},
    "falcon_mamba": NO_ATTENTION,
    "falcon_h1": {**MAMBA2, "mamba_d_ssm": 96},
    "granitemoehybrid": {**MAMBA2, "layer_types": ["mamba", "attention", "mamba"]},
    "jamba": {"attn_layer_period": 3, "attn_layer_offset": 1},
    "kimi_linear": {
        **LATENT,
        "linear_num_heads": 4,
        "linear_head_dim": 16,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
    },
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1},
    "mamba": NO_ATTENTION,
    "mamba2": {
        "max_position_embeddings": 512,
        "num_heads": 8,
        "head_dim": 12,
        "state_size": 16,
        "n_groups": 2,
        "chunk_size": 32,
    },
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 12,
        "ssm_state_size": 16,
        "n_groups": 2,
        "chunk_size": 32,
    },
    "minimax": {
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "block_size": 32,
    },
    "olmo_hybrid": {"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    "qwen3_5_moe_text": DELTA,
    "qwen3_5_text": DELTA,
    "qwen3_next": DELTA,
    "zamba": {
        "mamba_dt_rank": 4,
        "mamba_d_state": 16,
        "attn_layer_offset": 1,
        "attn_layer_period": 3,
    },
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention"],
        "mamba_d_state": 16,
        "chunk_size": 32,
    },
}
INDEX = {"index_topk": 12, "index_n_heads": 8, "index_head_dim": 16}
#: Served with index keys beside keys and values.
INDEXED: dict[str, dict[str, Any]] = {
    "axk2": {**LATENT, **INDEX},
    "deepseek_v32": {**LATENT, **INDEX},
    "dots3_note_text": {
        **LATENT,
        **INDEX,
        "head_dim": 24,
        "layer_types": ["indexed_attention", "sliding_attention", "indexed_attention"],
        "per_layer_config": {"01": {**LATENT, "head_dim": 24}},
    },
    "glm_moe_dsa": {**LATENT, **INDEX, "indexer_types": ["full", "shared", "full"]},
    "hy_v4": {**LATENT, **INDEX},
    "minimax_m3_vl_text": {
        "layer_types": ["minimax_m3_sparse"] * 3,
        "index_n_heads": 2,
        "index_head_dim": 8,
        "index_block_size": 4,
        "index_topk_blocks": 3,
        "index_local_blocks": 1,
    },
}
#: The same below a model that reads images too.
WITH_INDEX_AND_IMAGES: dict[str, dict[str, Any]] = {
    "dots3_note": {
        "text_config": INDEXED["dots3_note_text"],
        "vision_config": {
            "mlp_layer_types": ["dense", "dense"],
            "adapter_in_dim": 32,
            "adapter_out_dim": 48,
        },
        "audio_config": {"adapter_input_size": 32, "adapter_out_dim": 48},
    },
    "glm5_next": {
        "text_config": {
            **LATENT,
            **INDEX,
            "qk_rope_head_dim": 0,
            "index_kpool": 4,
            "linear_num_heads": 4,
            "linear_head_dim": 16,
            "layer_types": ["linear_attention", "indexed_attention", "indexed_attention"],
            "indexer_types": ["full", "full", "shared"],
        }
    },
    "minimax_m3_vl": {"text_config": INDEXED["minimax_m3_vl_text"]},
    "mistral_large4": {
        "text_config": {
            **LATENT,
            **INDEX,
            "num_hidden_layers": 4,
            "no_rope_layers": [1, 0, 1, 1],
            "kv_source_layers": [0, 1, 0, 3],
            "indexer_types": ["full", "shared", "full", "shared"],
        }
    },
}
SERVED |= WITH_STATES | INDEXED
REFUSED: dict[str, dict[str, Any]] = {
    **as_they_are("""
    doge inkling_text openai-gpt recurrent_gemma rwkv xglm xmod
    """),
    "codegen": {"rotary_dim": 8},
    "gpt_neo": {"attention_types": [[["global", "local", "global"], 1]]},
    "qwen4_exp_text": {
        **DELTA,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 32,
        "indexer_compress_ratio": 4,
    },
    "gptj": {"rotary_dim": 8},
}
BY_NAME = {name: Family(name, name, values) for name, values in {**SERVED, **REFUSED}.items()}


def class_name(name: str) -> str:
    """What config.json calls the architecture."""
    found: str = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[BY_NAME[name].model_type]
    return found


def make_architecture(folder: Path, name: str, **values: Any) -> Path:
    """Write a random float32 checkpoint with its tokenizer and further `values`; return its folder."""
    torch.manual_seed(len(name))
    return write_random(
        AutoModelForCausalLM.from_config(_config_for(BY_NAME[name], values)), folder
    )


def _config_for(family: Family, more: dict[str, Any]) -> PreTrainedConfig:
    """The family's configuration; of COMMON and MORE what its class has a name for."""
    kind = CONFIG_MAPPING[family.model_type]
    known = kind()
    known.allow_global_per_layer_attribute_access = True
    common = {name: value for name, value in {**COMMON, **MORE}.items() if hasattr(known, name)}
    values = {**common, **family.values, **more}
    return kind(**{name: value for name, value in values.items() if value is not None})


def add_sizes(folder: Path) -> None:
    """Give config.json the sizes that the engine reads of every model, where the class has no such thing."""
    path = folder / "config.json"
    sizes = {"num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": 512}
    path.write_text(json.dumps({**sizes, **json.loads(path.read_text())}))


def small(folder: Path, **changes: Any) -> EngineConfig:
    """A configuration to start with."""
    return EngineConfig(str(folder), **{"max_model_len": 100, "kv_cache_bytes": 1 << 22, **changes})


class ArchitectureRuns:
    """An architecture's checkpoint in the modes of family_runs, through transformers."""

    def __init__(self, folder: Path, name: str) -> None:
        self.reference = Reference(
            make_architecture(folder, name),
            prompts(),
            num_new_tokens=NUM_NEW_TOKENS,
            use_cache=False,
        )

    def run(self, mode: str = "all", backend: str = "torch") -> tuple[list[str], EngineStats]:
        """As family_runs.run. Raises UnsupportedModel for an architecture that is refused."""
        settings = {"model_path": "transformers", "block_bytes": self._block_bytes}
        return run(self.reference, mode, backend, **settings)

    @cached_property
    def _block_bytes(self) -> int:
        """Of one rank that has all: what the layers are is known when the model is loaded."""
        config = config_of(
            self.reference.folder, "whole", model_path="transformers", block_bytes=1 << 16
        )
        with Engine(config) as built:
            runner = built._open_runner()
            assert isinstance(runner, ModelRunner)
            model = runner.model
            block_bytes = engine.attention.kv_cache.block_bytes
            return block_bytes(model.attention_layers, BLOCK_SIZE, torch.float32, model.index_keys)


Architectures = Callable[[str], ArchitectureRuns]
