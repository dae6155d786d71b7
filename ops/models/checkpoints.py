"""A small random checkpoint of any model that generates text in transformers, made to show a mistake."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from tests.engine.architectures import (
    HALVES,
    LATENT,
    MORE,
    NO_ENCODER,
    REFUSED,
    ROPES,
    SERVED,
    WITH_INDEX_AND_IMAGES,
)
from tests.engine.checkpoints import write_random
from tests.engine.families import COMMON, GEMMA3_LAYERS, rope

#: Model type -> class. Of those that read more than text, the text alone is asked for.
CAUSAL: Mapping[str, str] = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
WITH_IMAGES: Mapping[str, str] = MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

#: Of a part for images or sound, as far as its class knows the names.
OTHER_PART = {
    **dict.fromkeys(("hidden_size", "embed_dim", "width", "d_model", "head_dim"), 32),
    **dict.fromkeys(("intermediate_size", "mlp_dim", "encoder_ffn_dim"), 64),
    **dict.fromkeys(("num_hidden_layers", "depth", "num_layers", "encoder_layers"), 2),
    **dict.fromkeys(
        ("num_attention_heads", "num_heads", "encoder_attention_heads", "num_key_value_heads"), 2
    ),
    **dict.fromkeys(("out_hidden_size", "projection_dim", "text_hidden_size"), 48),
    "image_size": 28,
    "patch_size": 14,
    "head_dim": 16,
}
OUTER = {"hidden_size": 48, "tie_word_embeddings": False, "vocab_size": 512, "projection_dim": 48}


def mrope(*sections: int, **parameters: Any) -> dict[str, Any]:
    """Values of a text part whose rotation has sections for time, height and width."""
    return {"text_config": {"rope_parameters": rope(mrope_section=list(sections), **parameters)}}


EMU3 = {"base_channels": 32, "codebook_size": 8, "hidden_size": 64}
CHAMELEON = {"base_channels": 32, "num_embeddings": 8, "latent_channels": 32, "embed_dim": 32}
A_PICTURE = {"vocabulary_map": {"<image>": 3}, "image_token_id": 3}
DECODING = """
big_bird camembert data2vec-text megatron-bert rembert roberta roberta-prelayernorm roformer xlm-roberta xlm-roberta-xl
""".split()  # noqa: SIM905

#: Values beside COMMON and MORE, by model type; a part's by the part's name. None leaves the class its own.
VALUES: dict[str, dict[str, Any]] = {
    **REFUSED,
    **SERVED,
    **WITH_INDEX_AND_IMAGES,
    **dict.fromkeys(DECODING, NO_ENCODER),
    **dict.fromkeys(
        ("glm4v", "glm46v", "glm_ocr", "glmga", "qwen2_5_vl", "qwen2_vl"), mrope(2, 2, 2)
    ),
    **dict.fromkeys(("cosmos3_edge", "hunyuan_vl", "paddleocr_vl"), mrope(2, 3, 3)),
    "chameleon": {**A_PICTURE, "vq_config": CHAMELEON},
    "cohere_compass": {"text_config": ROPES},
    "emu3": {**A_PICTURE, "vq_config": EMU3},
    "fun_asr_nano": {"adaptor_config": {"hidden_size": 48, "intermediate_size": 12}},
    "gemma4": {"text_config": SERVED["gemma4_text"]},
    "gemma4_unified": {
        "text_config": {**SERVED["gemma4_unified_text"], "use_bidirectional_attention": "vision"}
    },
    "gemma3": {
        "text_config": {**GEMMA3_LAYERS, "query_pre_attn_scalar": 24},
        "mm_tokens_per_image": 4,
    },
    "glm4v_moe": mrope(1, 1, 1, partial_rotary_factor=0.5),
    "kimi_k25": {"text_config": LATENT},
    "lfm2_vl": {"text_config": SERVED["lfm2"]},
    "llama4": {"text_config": SERVED["llama4_text"]},
    "mistral4": LATENT,
    "molmo2": {
        "vision_config": {"image_size": [28, 28]},
        "adapter_config": {"vision_feature_layer": [1, 0]},
    },
    "prophetnet": {**HALVES, **NO_ENCODER, "num_decoder_layers": 2, "num_hidden_layers": None},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 509},
    "reformer": {**NO_ENCODER, "axial_pos_embds": False},
    "qwen2_5_omni_thinker": {**mrope(2, 2, 2), "vision_start_token_id": 509},
    "qwen3_asr": {"text_config": {"eos_token_id": 2}, "eos_token_id": 2},
    "unlimited_ocr": {"text_config": {"num_key_value_heads": 4}},
    "xlnet": {
        "d_model": 48,
        "n_layer": 2,
        "n_head": 4,
        "d_inner": 96,
        "max_position_embeddings": None,
    },
    "zaya": {"num_experts_per_tok": 1, "layer_types": ["hybrid"] * 3},
}


def make(folder: Path, names: Mapping[str, str], model_type: str, **more: Any) -> Any:
    """Write the checkpoint of a type, with `more` values; return its class. Raises whatever transformers does."""
    if model_type == "shieldgemma2":  # Gemma 3 is within its class
        raise ValueError("it classifies pictures")
    torch.manual_seed(len(model_type))
    kind = getattr(transformers, names[model_type])
    config = _config(model_type, {**VALUES.get(model_type, {}), **more})
    if not isinstance(config, kind.config_class) and isinstance(
        config.get_text_config(), kind.config_class
    ):
        config = config.get_text_config()
    write_random(kind._from_config(config), folder)
    return kind


def _config(model_type: str, values: Mapping[str, Any]) -> Any:
    kind: Any = CONFIG_MAPPING[model_type]
    known = kind()
    if not kind.sub_configs:
        return _of_known(kind, {**COMMON, **MORE}, values)
    text = known.get_text_config(decoder=True)
    parts = {}
    for name in kind.sub_configs:
        part = getattr(known, name, None)
        if part is None or isinstance(part, dict):
            continue
        of_text = part is text or "text" in name or "thinker" in name
        more = values.get(name, {})
        if of_text and part.sub_configs:
            parts[name] = _config(part.model_type, more)
        else:
            parts[name] = _of_known(type(part), {**COMMON, **MORE} if of_text else OTHER_PART, more)
    own = {name: value for name, value in values.items() if name not in parts}
    outer = OUTER if text is not known else {**COMMON, **MORE}
    return kind(
        **parts, **{**{name: value for name, value in outer.items() if hasattr(known, name)}, **own}
    )


def _of_known(kind: Any, common: Mapping[str, Any], values: Mapping[str, Any]) -> Any:
    """A configuration with the common values that its class has a name for, and with these in any case."""
    known = kind()
    known.allow_global_per_layer_attribute_access = True
    chosen = {name: value for name, value in common.items() if hasattr(known, name)}
    return kind(
        **{name: value for name, value in {**chosen, **values}.items() if value is not None}
    )
