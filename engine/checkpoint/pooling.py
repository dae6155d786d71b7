"""Pooling: how a checkpoint turns a text into one vector, as the files of sentence-transformers say."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from reprlib import repr as brief  # short
from typing import Any

from engine.checkpoint.model_config import ModelConfig, read_json, read_json_value
from engine.errors import ConfigError, UnsupportedModel

MODULES = "modules.json"
TRANSFORMER_FILE = "sentence_bert_config.json"
PROMPTS_FILE = "config_sentence_transformers.json"

#: Ways to make a text's vector of its hidden states, by sentence-transformers' names.
MODES = ("cls", "lasttoken", "max", "mean", "mean_sqrt_len_tokens", "weightedmean")

#: Older files' switches of modes, in the order in which their vectors stand side by side.
OLD_SWITCHES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
PACKAGE = "sentence_transformers."
SUPPORTED = "a Transformer of texts, a Pooling, and Dense and Normalize after it"
ACTIVATIONS = ("Identity", "ReLU", "Tanh")


@dataclass(frozen=True)
class Dense:
    """A dense layer after the pooling. folder: holds its weights. activation: a name in ACTIVATIONS."""

    folder: Path
    out_features: int
    activation: str


@dataclass(frozen=True)
class Pooling:
    """The way in which a text becomes a vector.

    modes: names in MODES; the vectors of several modes are concatenated.
    dense: layers after the pooling, in order.  normalize: the last vector is scaled to length 1.
    max_seq_length: the number of tokens to which a text is cut; None leaves it whole.
    prompts: texts that may be put before a text, by name.  default_prompt: the name of the default prompt.
    """

    modes: tuple[str, ...]
    normalize: bool = False
    max_seq_length: int | None = None
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    dense: tuple[Dense, ...] = ()

    def size(self, hidden_size: int) -> int:
        """Return how many numbers a vector has."""
        return self.dense[-1].out_features if self.dense else hidden_size * len(self.modes)


def read_pooling(folder: Path, model: ModelConfig, wanted: str | None = None) -> Pooling | None:
    """Return how a checkpoint makes vectors; None if its files do not say.

    wanted: a mode in place of what the files say.  Raises UnsupportedModel or another ConfigError.
    """
    if not (folder / MODULES).is_file():
        return None if wanted is None else Pooling((wanted,))
    modes: tuple[str, ...] | None = None
    normalize = False
    dense: list[Dense] = []
    for place, (kind, path) in enumerate(_modules(folder)):
        if kind == "Transformer" and place == 0:
            if path.strip("./"):
                raise UnsupportedModel(
                    f"{folder / MODULES} keeps its model in the folder {path!r}: move its files beside "
                    f"{MODULES} and make that path empty"
                )
        elif kind == "Pooling" and place == 1:
            modes = _read_modes(folder / path / "config.json", model.hidden_size)
        elif kind == "Dense" and modes is not None and not normalize:
            dense.append(_read_dense(folder / path))
        elif kind == "Normalize" and modes is not None:
            normalize = True
        else:
            raise UnsupportedModel(
                f"{folder / MODULES} has the module {kind!r} in place {place}; embeddings need "
                f"{SUPPORTED}, in this order"
            )
    if modes is None:
        raise UnsupportedModel(f"{folder / MODULES} has no Pooling; embeddings need {SUPPORTED}")
    prompts, default_prompt = _read_prompts(folder)
    modes = modes if wanted is None else (wanted,)
    longest = _read_max_seq_length(folder) or model.max_position_embeddings
    longest = min(longest, model.max_position_embeddings)
    return Pooling(modes, normalize, longest, prompts, default_prompt, tuple(dense))


def _modules(folder: Path) -> list[tuple[str, str]]:
    """Return each module's folder and the last name of its type."""
    listed = read_json_value(folder / MODULES)
    if not isinstance(listed, list) or not listed:
        raise ConfigError(f"{folder / MODULES} must hold a list of modules, found {brief(listed)}")
    modules = []
    for module in listed:
        values = module if isinstance(module, dict) else {}
        kind = values.get("type")
        path = values.get("path")
        if (
            not isinstance(kind, str)
            or not isinstance(path, str)
            or ".." in path
            or path.startswith("/")
        ):
            raise ConfigError(
                f"{folder / MODULES} must name each module's type and its folder, inside this one: {brief(module)}"
            )
        if kind.startswith(PACKAGE):
            kind = kind.rpartition(".")[2]
        # Types of other packages keep their whole names, as their code may do anything.
        modules.append((kind, path))
    return modules


def _read_modes(path: Path, hidden_size: int) -> tuple[str, ...]:
    values = read_json(path)
    modes = values.get("pooling_mode")
    if modes is None:
        modes = [mode for key, mode in OLD_SWITCHES.items() if values.get(key)] or ["mean"]
    modes = [modes] if isinstance(modes, str) else modes
    if not isinstance(modes, list) or not modes or not all(mode in MODES for mode in modes):
        raise UnsupportedModel(
            f"{path}: pooling_mode {brief(modes)}; supported are {', '.join(MODES)}"
        )
    size = values.get("embedding_dimension", values.get("word_embedding_dimension", hidden_size))
    if size != hidden_size:
        raise ConfigError(
            f"{path} pools vectors of {brief(size)} numbers, and the model's vectors have {hidden_size}"
        )
    if values.get("include_prompt", True) is not True:
        raise UnsupportedModel(
            f"{path}: include_prompt must be true: prompts are pooled with their texts"
        )
    return tuple(modes)


def _read_dense(folder: Path) -> Dense:
    values = read_json(folder / "config.json")
    size = values.get("out_features")
    activation = str(values.get("activation_function")).rpartition(".")[2]
    if type(size) is not int or size < 1 or activation not in ACTIVATIONS:
        raise UnsupportedModel(
            f"{folder}: out_features {brief(size)} and activation_function {brief(activation)}; supported are "
            f"{', '.join(ACTIVATIONS)}"
        )
    return Dense(folder, size, activation)


def _read_max_seq_length(folder: Path) -> int | None:
    path = folder / TRANSFORMER_FILE
    values = read_json(path) if path.is_file() else {}
    for key, known in (("do_lower_case", False), ("transformer_task", "feature-extraction")):
        if values.get(key, known) != known:
            raise UnsupportedModel(
                f"{path}: {key} {brief(values[key])} is not supported, {known!r} is"
            )
    if "message" in (values.get("modality_config") or {}):
        raise UnsupportedModel(
            f"{path}: modality_config puts texts into the chat template; supported are texts as they stand"
        )
    length = values.get("max_seq_length")
    if length is None:
        # The tokenizer's own file may have it. There a very large number stands for no limit.
        path = folder / "tokenizer_config.json"
        length = read_json(path).get("model_max_length") if path.is_file() else None
        return length if type(length) is int and length > 0 else None
    if type(length) is not int or length < 1:
        raise ConfigError(f"{path}: max_seq_length must be a positive integer, got {brief(length)}")
    return length


def _read_prompts(folder: Path) -> tuple[dict[str, str], str | None]:
    path = folder / PROMPTS_FILE
    values: dict[str, Any] = read_json(path) if path.is_file() else {}
    prompts = {name: text or "" for name, text in (values.get("prompts") or {}).items()}
    if not all(isinstance(text, str) for text in prompts.values()):
        raise ConfigError(f"{path}: prompts must be texts by name, got {brief(prompts)}")
    default = values.get("default_prompt_name")
    if default is not None and default not in prompts:
        raise ConfigError(
            f"{path}: default_prompt_name {brief(default)} is none of {', '.join(prompts)}"
        )
    return prompts, default
