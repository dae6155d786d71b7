"""ModelConfig: the engine's view of a checkpoint's config.json and generation_config.json."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from reprlib import repr as brief  # short
from typing import Any

from engine.checkpoint.quantization import Quantization, read_quantization
from engine.checkpoint.text_part import read_text_values, reads_more_than_text
from engine.errors import ConfigError, MissingWeights, UnsupportedModel

MAX_SIZE = 2**31
MAX_LAYERS = 10_000
MAX_JSON_BYTES = 64 << 20  # the index of a thousand shards has some ten MiB
UNNAMED = "none named"

#: The names that architectures have for each size, the first one to look for first: a decoder's before an encoder's.
NAMES = {
    "hidden_size": ("hidden_size", "n_embd", "d_model", "dim", "embed_dim", "emb_dim"),
    "intermediate_size": (
        "decoder_ffn_dim", "intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "moe_intermediate_size",
    ),
    "num_hidden_layers": (
        "decoder_layers", "num_decoder_layers", "num_hidden_layers", "n_layer", "n_layers", "num_layers", "layers",
    ),
    "num_attention_heads": (
        "decoder_attention_heads", "num_decoder_attention_heads", "num_attention_heads", "n_head", "n_heads",
        "num_heads", "attention_heads",
    ),
    "num_key_value_heads": ("num_key_value_heads", "num_kv_heads"),
    "max_position_embeddings": ("max_position_embeddings", "n_positions", "max_seq_len", "model_max_length"),
}  # fmt: skip
UNLIMITED = 2048  # the most tokens of a model that states no limit, such as one with ALiBi


@dataclass(frozen=True)
class ModelConfig:
    """The sizes and facts that the engine needs to know of any model.

    architecture: the first that config.json names, or the text part's own.
    hidden_size to head_dim: they decide the memory of a step, and how many ranks can share the model.
    dtype: of the checkpoint.  eos_token_ids: the tokens that end a completion.
    values: the part of config.json that is about text. A reader of one architecture's own keys finds them here.
    whole: the first architecture that config.json names, if the model has parts for images or sound too; else None.
    reads_pictures: the part for images is used.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    dtype: str
    eos_token_ids: frozenset[int]
    quantization: Quantization | None
    values: Mapping[str, Any]
    whole: str | None
    reads_pictures: bool = False

    @property
    def is_text_part(self) -> bool:
        """Whether this describes the text part of a checkpoint that has parts for images or sound too."""
        return self.whole is not None


def read_model_config(folder: Path) -> ModelConfig:
    """Read a Hugging Face model folder, with the keys of transformers 4 or 5.

    Raises ConfigError for an unreadable file or a value that no model can have, and UnsupportedModel for a model that
    is not a decoder of text.
    """
    path = folder / "config.json"
    config = read_json(path)
    generation_file = folder / "generation_config.json"
    generation = read_json(generation_file) if generation_file.is_file() else {}
    whole = None
    architectures = config.get("architectures") or [UNNAMED]
    if not isinstance(architectures, list):
        raise ConfigError(
            f"{path} holds a value of a wrong kind: architectures must be a list, got {brief(architectures)}"
        )
    if reads_more_than_text(config):
        whole = architectures[0]
        config = read_text_values(folder, config)
    try:
        architectures = config.get("architectures") or [UNNAMED]
        hidden = _size(config, "hidden_size")
        num_heads = _size(config, "num_attention_heads", 1)  # absent in a model without attention
        num_listed_layers = len(config.get("layers_block_type") or ())
        read = ModelConfig(
            architecture=architectures[0],
            vocab_size=config["vocab_size"],
            hidden_size=hidden,
            intermediate_size=_size(config, "intermediate_size", 4 * hidden),
            num_layers=_size(config, "num_hidden_layers", num_listed_layers or None),
            num_heads=num_heads,
            num_kv_heads=_size(config, "num_key_value_heads", num_heads),
            head_dim=config.get("head_dim") or hidden // num_heads,
            max_position_embeddings=_longest(config),
            dtype=config.get("dtype") or config.get("torch_dtype") or "float32",
            eos_token_ids=_token_ids(generation.get("eos_token_id"))
            or _token_ids(config.get("eos_token_id")),
            quantization=read_quantization(config),
            values=config,
            whole=whole,
        )
    except KeyError as error:
        listed = brief(config.get("architectures"))
        raise UnsupportedModel(
            f"{path} has no {error.args[0]!r}, which every decoder of text has (architectures: {listed}): the file is "
            "incomplete, or describes another kind of model"
        ) from error
    except (TypeError, ValueError, AttributeError, ArithmeticError, LookupError) as error:
        raise ConfigError(
            f"{path} or {generation_file} holds a value of a wrong kind: {error}"
        ) from error
    _check_values(read, path)
    return read


def _size(config: Mapping[str, Any], name: str, default: Any = None) -> Any:
    """Return a size by any of its names. Raises KeyError if it has none and there is no default."""
    for key in NAMES[name]:
        value = config.get(key)
        if value is not None:
            # A list has a size for each layer.
            return max(value) if isinstance(value, list) and value else value
    if default is None:
        raise KeyError(name)
    return default


def _longest(config: Mapping[str, Any]) -> Any:
    """Return the number of tokens of the longest possible sequence.

    YaRN stretches the length that a checkpoint was trained with. max_position_embeddings may still be the old length:
    Qwen3's model card says to add rope_scaling, but not to change max_position_embeddings. vLLM reads YaRN likewise.
    """
    longest = written_length(config)
    for name in ("rope_scaling", "rope_parameters"):
        declared = config.get(name)
        if not isinstance(declared, Mapping):
            continue
        # The values may be parameters for each type of layer.
        for parameters in (declared, *declared.values()):
            if isinstance(parameters, Mapping) and "yarn" in (
                parameters.get("rope_type"),
                parameters.get("type"),
            ):
                longest = max(longest, _stretched(config, parameters))
    return longest


def _stretched(config: Mapping[str, Any], parameters: Mapping[str, Any]) -> int:
    """Return the length to which YaRN stretches the original length; 0 if one of its values is not a number."""
    name = "original_max_position_embeddings"
    original = config.get(name) or parameters.get(name) or written_length(config)
    factor = parameters.get("factor")
    if not isinstance(original, int | float) or not isinstance(factor, int | float):
        return 0
    stretched = original * factor
    return int(stretched) if math.isfinite(stretched) else 0


def written_length(config: Mapping[str, Any]) -> Any:
    """Return the length that config.json names, which YaRN may stretch."""
    return _size(config, "max_position_embeddings", UNLIMITED)


def _check_values(read: ModelConfig, path: Path) -> None:
    """Raise ConfigError unless every value has the right type and every size is possible."""
    for field in fields(read):
        value = getattr(read, field.name)
        most = MAX_LAYERS if field.name == "num_layers" else MAX_SIZE - 1
        if field.type is int and (type(value) is not int or not 0 < value <= most):
            raise ConfigError(
                f"{path}: {field.name} must be between 1 and {most}, got {brief(value)}"
            )
        if field.type is str and type(value) is not str:
            raise ConfigError(f"{path}: {field.name} must be a text, got {brief(value)}")
    for token_id in read.eos_token_ids:
        if type(token_id) is not int or not 0 <= token_id < read.vocab_size:
            raise ConfigError(
                f"{path}: the end token {brief(token_id)} is outside the vocabulary of {read.vocab_size}; "
                "correct eos_token_id there or in generation_config.json"
            )


def longrope_length(model: ModelConfig) -> int | None:
    """Return the length up to which the short rotary factors apply; None for a model with one set of factors.

    If longer sequences are possible, all sequences take the long factors.
    """
    scaling = model.values.get("rope_scaling") or model.values.get("rope_parameters")
    parameters = scaling if isinstance(scaling, Mapping) else {}
    if "short_factor" not in parameters:
        return None
    original: Any = model.values.get("original_max_position_embeddings")
    if original is None:
        original = parameters.get("original_max_position_embeddings")
    return original if isinstance(original, int) else None


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises MissingWeights if the file is absent, ConfigError if it holds no object."""
    value = read_json_value(path)
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object, found {type(value).__name__}")
    return value


def read_json_value(path: Path) -> Any:
    """Read JSON of any kind. Raises MissingWeights if the file is absent, ConfigError if it is no JSON."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ConfigError(
                f"{path} has {path.stat().st_size} bytes, more than any checkpoint's; fetch it again"
            )
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise MissingWeights(
            f"{path} is missing; the model folder is incomplete, fetch it again"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from error


def number(values: Mapping[str, Any], name: str) -> float:
    """Return a number above 0. Raises ConfigError for another value, KeyError if it is absent."""
    value = values[name]
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise ConfigError(f"config.json: {name} must be a number above 0, got {brief(value)}")
    return float(value)


def optional_number(values: Mapping[str, Any], name: str) -> float | None:
    """Return a number above 0, None if it is null or absent. Raises ConfigError for another value."""
    return None if values.get(name) is None else number(values, name)


def _token_ids(value: int | list[int] | None) -> frozenset[int]:
    """Read eos_token_id, which may be one id, a list of them, or null."""
    if value is None:
        return frozenset()
    return frozenset(value) if isinstance(value, list) else frozenset((value,))
