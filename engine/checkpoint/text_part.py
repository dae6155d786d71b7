"""The text part of a checkpoint that reads images or sound too: its configuration and its tensors."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from engine.errors import ConfigError

#: Architectures whose text part the native decoder computes exactly, if its type is listed below. Others run whole.
QWENS = ("Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "Qwen3VLMoe", "Qwen3_5", "Qwen3_5Moe")
NATIVE = [f"{name}ForConditionalGeneration" for name in ("Gemma3", "Llava", "Mistral3", *QWENS)]

#: The text part's architecture, by its model type. Qwen-VL gives a token three positions, in time, height and width;
#: for a token of text they are equal.
TEXT_ARCHITECTURES = {
    "gemma3_text": "Gemma3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_5_vl_text": "Qwen2ForCausalLM",
    "qwen2_vl_text": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_vl_moe_text": "Qwen3MoeForCausalLM",
    "qwen3_vl_text": "Qwen3ForCausalLM",
}

#: Values that a text part always has, whatever its configuration says.
FIXED = {"qwen3_vl_moe_text": {"norm_topk_prob": True}}

#: Keys of a rotary embedding for a token's place in an image.
IMAGE_KEYS = ("mrope_section", "mrope_interleaved")

#: Prefixes of the text part's tensors, older layouts included, each with the prefix in a text model.
PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}

#: Prefixes of other parts' tensors, with or without "model." before.
OTHER_PARTS = (
    "vision_tower.",
    "vision_model.",
    "visual.",
    "multi_modal_projector.",
    "image_newline",
)

T = TypeVar("T")


def reads_more_than_text(config: Mapping[str, Any]) -> bool:
    """Whether config.json is about a model that has parts for images or sound."""
    return any(
        isinstance(config.get(f"{part}_config"), dict) for part in ("text", "vision", "audio")
    )


def read_text_values(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json for the text part alone, with the defaults of transformers' class.

    The result's `architectures` names the text part's own architecture if the native decoder computes it, else the
    whole model's.
    """
    from transformers import AutoConfig

    try:
        read: Any = AutoConfig.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
        text = read.get_text_config(decoder=True)
        values: dict[str, Any] = text.to_dict()
        tied = getattr(read, "tie_word_embeddings", values.get("tie_word_embeddings", False))
    except Exception as error:  # transformers may raise anything for a damaged file
        raise ConfigError(f"{folder / 'config.json'} cannot be read: {error}") from error
    architectures = config.get("architectures")
    native = (
        TEXT_ARCHITECTURES.get(values["model_type"])
        if architectures and architectures[0] in NATIVE
        else None
    )
    rope = values.get("rope_parameters") or {}
    # These keys stand beside the section of the text part, not in it.
    outer = {
        key: config[key]
        for key in ("quantization_config", "eos_token_id")
        if config.get(key) is not None
    }
    return {
        **values,
        **outer,
        **FIXED.get(values["model_type"], {}),
        "architectures": architectures if native is None else [native],
        "dtype": values.get("dtype") or config.get("dtype") or config.get("torch_dtype"),
        "rope_parameters": {key: value for key, value in rope.items() if key not in IMAGE_KEYS},
        "tie_word_embeddings": tied,
    }


def text_tensors(tensors: Mapping[str, T]) -> dict[str, T]:
    """Return the text part's tensors by the names that they have in a text model."""
    by_text_name = {text_name(name): tensor for name, tensor in tensors.items()}
    return {name: tensor for name, tensor in by_text_name.items() if name is not None}


def text_name(name: str) -> str | None:
    """Return a tensor's name in a text model; None if it belongs to another part."""
    if name.removeprefix("model.").startswith(OTHER_PARTS):
        return None
    for prefix, instead in PREFIXES.items():
        if name.startswith(prefix):
            return instead + name.removeprefix(prefix)
    return name
