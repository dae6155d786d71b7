"""Reads the classes of a checkpoint with a sequence-classification head."""

from collections.abc import Mapping
from dataclasses import dataclass
from reprlib import repr as brief  # short
from typing import Any

from engine.checkpoint.model_config import ModelConfig
from engine.errors import ConfigError, UnsupportedModel

CLASSIFIES = "ForSequenceClassification"
MAX_LABELS = 10_000
MAX_LABEL_CHARS = 1_000

#: Endings of the names of models that give hidden states and need no head for them.
BODY_ENDS = ("Model", "ForMaskedLM", "ForPreTraining")


@dataclass(frozen=True)
class Classes:
    """The classes of a classification head. labels: the classes' names, in the order of the head's outputs.

    is_exclusive: a text has exactly one class, by softmax; otherwise a sigmoid decides on each class by itself. This
    has no meaning for a head with a single class, whose output is used as a plain number.
    has_plain_relevance: a cross-encoder's number is given as it is, without a sigmoid.
    """

    labels: tuple[str, ...]
    is_exclusive: bool
    has_plain_relevance: bool


def reads_in_one_pass(architecture: str) -> bool:
    """Whether a model of this name reads each text in one pass, without a KV cache, unless the decoder is native."""
    has_such_a_name = architecture.endswith((CLASSIFIES, *BODY_ENDS))
    return has_such_a_name and not architecture.endswith("HeadModel")


def read_classes(model: ModelConfig) -> Classes | None:
    """Return a checkpoint's classes; None for one without such a head. Raises ConfigError or UnsupportedModel."""
    if not model.architecture.endswith(CLASSIFIES):
        return None
    id2label = model.values.get("id2label")
    number = model.values.get("num_labels") or 2
    if type(number) is not int or not 0 < number <= MAX_LABELS:
        raise ConfigError(
            f"config.json: num_labels must be between 1 and {MAX_LABELS}, got {brief(number)}"
        )
    labels = _labels(id2label) if id2label else tuple(f"LABEL_{i}" for i in range(number))
    if labels is None or len(set(labels)) != len(labels):
        raise ConfigError(
            "config.json: id2label must give each class, counted from 0, a name of its own: at most "
            f"{MAX_LABELS} names, of at most {MAX_LABEL_CHARS} characters each"
        )
    problem = model.values.get("problem_type")
    if problem == "regression" and len(labels) > 1:
        raise UnsupportedModel(
            f"{model.architecture} gives {len(labels)} numbers of regression: one is supported"
        )
    library_values = model.values.get("sentence_transformers")
    activation = (
        library_values.get("activation_fn") if isinstance(library_values, Mapping) else None
    )
    activation = activation or model.values.get("sbert_ce_default_activation_function")
    return Classes(
        labels,
        is_exclusive=problem != "multi_label_classification",
        has_plain_relevance=str(activation).rpartition(".")[2] == "Identity",
    )


def _labels(id2label: Any) -> tuple[str, ...] | None:
    if not isinstance(id2label, Mapping) or len(id2label) > MAX_LABELS:
        return None
    by_number = {str(number): label for number, label in id2label.items()}
    labels = [by_number.get(str(number)) for number in range(len(by_number))]
    return tuple(map(str, labels)) if all(map(_is_name, labels)) else None


def _is_name(label: Any) -> bool:
    """Whether a label is a short text that JSON and Parquet can hold, which means without lone surrogates."""
    return (
        isinstance(label, str)
        and len(label) <= MAX_LABEL_CHARS
        and label == label.encode(errors="ignore").decode()
    )
