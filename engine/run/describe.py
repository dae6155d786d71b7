"""Describes how an engine would serve a checkpoint, without loading its weights or running its code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from engine.checkpoint.folder import find_here
from engine.errors import ModelNotFound, WeightMismatch
from engine.run.check_up import DTYPE_BYTES, weight_bytes, whole_weights
from engine.run.config import EngineConfig

if TYPE_CHECKING:
    from engine.attention.features import AttentionFeatures
    from engine.checkpoint.model_config import ModelConfig

MIB = 2**20

#: Keys of config.json for the number of experts, and for how many of them each token goes through.
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "top_k_experts")


def describe_model(name: str) -> str:
    """Return lines about a folder, or a hub id that is on this machine: how it is served, and the memory it takes.

    Raises UnsupportedModel for one that is not served, or another ConfigError if something is wrong with its files.
    """
    folder = find_here(name)
    if folder is None:
        raise ModelNotFound(f"{name!r} is not on this machine; fetch it: hf download {name}")
    return "\n".join(f"{subject:10} {text}" for subject, text in _lines(folder))


def _lines(folder: Path) -> Iterator[tuple[str, str]]:
    import torch

    from engine.attention.kv_cache import block_bytes
    from engine.checkpoint.heads import read_classes
    from engine.checkpoint.pooling import read_pooling
    from engine.layers.parallel import TensorParallel
    from engine.models.load import read_supported
    from engine.models.served import WITH_IMAGES, served_architectures
    from engine.models.single_pass import single_pass_class
    from engine.models.transformers_model import class_of, kept_by
    from engine.run.dtype import served_dtype
    from engine.run.forward.pictures.reader import find_reader
    from engine.text.chat_templates import read_template
    from engine.text.tokenizer import open_tokenizer

    config = EngineConfig(str(folder))
    model, path, reader = find_reader(folder, *read_supported(folder, config.model_path))
    name = model.whole or model.architecture
    new = ""
    if path.is_single_pass:
        single_pass_class(model.architecture)
    elif path.decoder is None:
        class_of(name)
        if name not in {*served_architectures(), *WITH_IMAGES}:
            new = "; nobody compared it with transformers yet: the start will probe it"
    dtype = served_dtype(config.dtype, model.dtype, config.device).name
    way = "through transformers" if path.decoder is None else "natively"
    yield "model", f"{name} runs {way}, in {dtype}{new}"
    open_tokenizer(folder)
    yield (
        "text",
        f"a vocabulary of {model.vocab_size:,} tokens, {_template(read_template(folder, None))}",
    )
    if reader is not None:
        yield (
            "pictures",
            "its processor is here: a start compares two with transformers' own code, and says so",
        )
    elif model.whole is not None:
        yield "pictures", "not read: its text alone is served"
    entries = whole_weights(folder)
    if model.num_layers > len(entries):  # refused here, before a model of that many layers is made
        raise WeightMismatch(
            f"{folder}: config.json names {model.num_layers} layers, the files {len(entries)} tensors"
        )
    weights = weight_bytes(config, model, entries, DTYPE_BYTES[dtype])
    yield "weights", f"{weights / MIB:,.1f} MiB in {len(entries)} tensors"
    if path.is_single_pass:
        classes = read_classes(model)
        pooling = read_pooling(folder, model)
        embeds = (
            "embeddings"
            if pooling
            else "embeddings if TOKENMILL_POOLING says how: modules.json is not here"
        )
        yield "gives", embeds if classes is None else _scores(classes.labels)
        yield "state", "none: each text is read in one pass, without a KV cache"
        return
    if path.decoder is None:
        kept_parts = kept_by(model, folder, getattr(torch, dtype))
    else:
        kept_parts = path.decoder.within(model.max_position_embeddings).kept(
            TensorParallel(), getattr(torch, dtype)
        )
    if kept_parts is None:
        yield "attention", "only its weights can tell, or it is refused at the start"
        return
    for features, number in Counter(kept_parts.layers).items():
        yield "attention", f"{number} of {model.num_layers} layers: {_kind(features)}"
    experts = _experts(model)
    if experts:
        yield "experts", experts
    token = block_bytes(kept_parts.layers, 1, getattr(torch, dtype), kept_parts.index_keys)
    yield (
        "KV cache",
        f"{token:,} bytes a token, sequences of up to {model.max_position_embeddings:,} tokens",
    )
    state = sum(prod(tensor.shape) * tensor.dtype.itemsize for tensor in kept_parts.states)
    yield "state", f"{state:,} bytes a sequence" if state else "none beside the KV cache"


def _template(source: str | None) -> str:
    """Describe a chat template by parsing it; it is not rendered."""
    from engine.text.chat_templates import read_variables

    if source is None:
        return "no chat template: chats are refused"
    return "a chat template" + (
        " that cannot be parsed: chats are refused" if read_variables(source) is None else ""
    )


def _scores(labels: Sequence[str]) -> str:
    """Describe what a head gives: the probability of each class, or one number if there is a single class."""
    return (
        f"classes: {', '.join(labels)}"
        if len(labels) > 1
        else "a score: of a text, or of a document for a query"
    )


def _kind(layer: AttentionFeatures) -> str:
    """Describe the attention of a layer."""
    parts = {
        f"a window of {layer.window} tokens": layer.window,
        f"chunks of {layer.chunk} tokens": layer.chunk,
        "a soft cap": layer.soft_cap,
        "sinks": layer.has_sinks,
        "slopes (ALiBi)": layer.has_slopes,
        "to tokens that an index chooses": layer.is_indexed,
    }
    heads = f"{layer.num_heads} heads over {layer.num_kv_heads} of keys and values, of {layer.head_dim} numbers"
    return ", ".join([heads, *(words for words, is_there in parts.items() if is_there)])


def _experts(model: ModelConfig) -> str:
    """Describe the experts, by the names of config.json; "" if it names none."""
    chosen = next(filter(None, map(model.values.get, CHOSEN)), None)
    experts = next(filter(None, map(model.values.get, EXPERTS)), None)
    return f"{chosen} of {experts} for each token" if chosen and experts else ""
