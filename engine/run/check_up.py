"""Checks whether an engine would start, without loading the model's weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from engine.checkpoint.adapter_folder import AdapterFolder
from engine.checkpoint.fingerprint import TensorEntry, check_file
from engine.checkpoint.folder import find_here, list_weight_files, named_places
from engine.errors import ConfigError, MissingWeights
from engine.run.config import EngineConfig, may_read_pictures
from engine.run.observation import Observation, fault_of

if TYPE_CHECKING:
    from engine.checkpoint.model_config import ModelConfig
    from engine.models.decoder_config import DecoderConfig
    from engine.models.load import ModelPath
    from engine.run.forward.memory import PoolSizes


GIB = 2**30
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def check_up(config: EngineConfig) -> Iterator[Observation]:
    """Check the model's files, the machine, and whether the model fits into it.

    Downloads nothing and changes nothing. Loads torch and transformers; on a GPU it makes a CUDA context.
    """
    from engine.run.check_machine import check_machine  # it loads torch

    yield from check_machine(config)
    try:
        folder = find_here(config.model)
    except ConfigError as error:
        yield fault_of("model", error)
        return
    if folder is None:
        text = f"{config.model!r} is not on this machine: the first start fetches it from the hub"
        mend = f"fetch it beforehand: hf download {config.model} (HF_TOKEN for gated models)"
        yield Observation("model", "warning", text, mend)
        return
    yield from _check_folder(config, folder)


def _check_folder(config: EngineConfig, folder: Path) -> Iterator[Observation]:
    entries: list[TensorEntry] = []  # of all tensors, once the files are found whole
    for subject, check in (
        ("model", _check_weights),
        ("tokenizer", _check_text),
        ("model", _check_served),
        ("adapters", _check_adapters),
    ):
        try:
            yield from check(config, folder, entries)
        except ConfigError as error:
            yield fault_of(subject, error)


def _check_weights(
    config: EngineConfig, folder: Path, entries: list[TensorEntry]
) -> Iterator[Observation]:
    entries += whole_weights(folder)
    yield Observation("model", "ok", f"{folder}: {len(entries)} tensors, every file is whole")


def whole_weights(folder: Path) -> list[TensorEntry]:
    """Return all tensors of a checkpoint.

    Raises MissingWeights for a missing or short file, or for a tensor that its file lacks.
    """
    files = {path.name: check_file(path) for path in list_weight_files(folder)}
    held = {name: {entry.name for entry in entries} for name, entries in files.items()}
    for tensor, name in named_places(folder).items():
        if name in held and tensor not in held[name]:
            raise MissingWeights(
                f"{folder / name} lacks {tensor}, which the index names there; fetch it again"
            )
    return [entry for entries in files.values() for entry in entries]


def _check_text(
    config: EngineConfig, folder: Path, entries: list[TensorEntry]
) -> Iterator[Observation]:
    from engine.models.load import read_supported
    from engine.text.tokenizer import Tokenizer

    tokenizer = Tokenizer(folder, config.chat_template)
    surplus = None
    with suppress(ConfigError):  # `_check_served` reports it
        surplus = tokenizer.surplus(read_supported(folder, config.model_path)[0].vocab_size)
    if surplus is not None:
        yield Observation("tokenizer", "warning", surplus, "fetch the model's own tokenizer")
    template = (
        "a chat template"
        if tokenizer.template is not None
        else "no chat template: jobs.chat is refused"
    )
    yield Observation("tokenizer", "ok", f"it loads, with {template}")


def _check_adapters(
    config: EngineConfig, folder: Path, entries: list[TensorEntry]
) -> Iterator[Observation]:
    if config.adapters is None:
        return
    from engine.models.load import read_supported
    from engine.run.forward.adapter_loader import check_takes_adapters

    _, path = read_supported(folder, config.model_path)
    check_takes_adapters(config.adapters, path)
    adapters, problems = AdapterFolder(config.adapters).look()
    for problem in problems.values():
        mend = "copy it again, or take it out of the folder: requests that name it fail"
        yield Observation("adapters", "warning", problem, mend)
    names = ", ".join(adapter.name for adapter in adapters) or "none yet"
    yield Observation("adapters", "ok", f"{config.adapters}: {names}")


def _check_served(
    config: EngineConfig, folder: Path, entries: list[TensorEntry]
) -> Iterator[Observation]:
    from engine.checkpoint.heads import read_classes
    from engine.checkpoint.pooling import read_pooling
    from engine.models.load import generates, read_supported
    from engine.models.served import served_architectures
    from engine.models.single_pass import single_pass_class
    from engine.models.transformers_model import class_of
    from engine.run.check_machine import check_support
    from engine.run.dtype import served_dtype
    from engine.run.forward.pictures.reader import find_reader
    from engine.run.forward.single_pass_runner import refuse_options

    model, path = read_supported(folder, config.model_path)
    if may_read_pictures(config):
        model, path, _ = find_reader(folder, model, path)
    check_support(config, model.dtype)
    dtype = served_dtype(config.dtype, model.dtype, config.device)
    pooling = read_pooling(folder, model, config.pooling) if read_classes(model) is None else None
    if entries:
        generates(folder, model, path, embeds=pooling is not None)
    if path.is_single_pass:
        single_pass_class(model.architecture)
        refuse_options(config, model.architecture)
        yield Observation(
            "model", "ok", f"{model.whole or model.architecture} {path}, in {dtype.name}"
        )
        return
    if path.decoder is None:
        class_of(model.whole or model.architecture)
    if path.decoder is None and model.architecture not in served_architectures():
        text = f"{model.architecture} {path}; it was not compared with transformers' own answers"
        yield Observation(
            "model", "warning", text, "look at its answers; `tokenmill models` lists what was"
        )
    else:
        yield Observation(
            "model", "ok", f"{model.whole or model.architecture} {path}, in {dtype.name}"
        )
    if entries:
        sizes = _pool_sizes(config, model, path, folder, dtype.name)
        weights = weight_bytes(config, model, entries, DTYPE_BYTES[dtype.name])
        weights //= config.tensor_parallel_size
        if model.quantization is not None and path.decoder is not None:
            weights = loaded_bytes(config, model, path.decoder, folder, dtype.name)
        yield from _check_memory(config, model, weights, DTYPE_BYTES[dtype.name], sizes)


def loaded_bytes(
    config: EngineConfig, model: ModelConfig, decoder: DecoderConfig, folder: Path, dtype: str
) -> int:
    """Return the bytes that a rank's weights of a native model take once they are loaded, packed or not."""
    import torch

    from engine.attention import load_backend
    from engine.layers.parallel import TensorParallel
    from engine.models.base import ModelPlace
    from engine.models.load import count_weight_bytes
    from engine.run.device import resolve_device

    device = resolve_device(config.device)
    torch_dtype = getattr(torch, dtype)
    backend = load_backend(config.attention_backend, device, torch_dtype, config.kv_cache_dtype)
    tp = TensorParallel(0, config.tensor_parallel_size)
    place = ModelPlace(tp, backend, device, torch_dtype, model.max_position_embeddings)
    return count_weight_bytes(model, folder, decoder, place, deterministic=config.deterministic)


def _pool_sizes(
    config: EngineConfig, model: ModelConfig, path: ModelPath, folder: Path, dtype: str
) -> PoolSizes | None:
    """Return a model's bytes per block and per state on one rank; None if only the weights can tell them."""
    import torch

    from engine.attention.kv_cache import FP8, block_bytes
    from engine.attention.state_pool import state_bytes
    from engine.layers.parallel import TensorParallel
    from engine.models.transformers_model import kept_by
    from engine.run.forward.memory import PoolSizes

    if path.decoder is None:
        kept_parts = kept_by(model, folder, getattr(torch, dtype))
    else:
        kept_parts = path.decoder.kept(
            TensorParallel(0, config.tensor_parallel_size), getattr(torch, dtype)
        )
    if kept_parts is None:
        return None
    kv_dtype = getattr(torch, dtype) if config.kv_cache_dtype == "auto" else FP8
    block = block_bytes(kept_parts.layers, config.block_size, kv_dtype, kept_parts.index_keys)
    return PoolSizes(block, state_bytes(kept_parts.states))


def _check_memory(
    config: EngineConfig,
    model: ModelConfig,
    weights: int,
    dtype_bytes: int,
    sizes: PoolSizes | None,
) -> Iterator[Observation]:
    """Check that weights, adapters and a KV pool fit into memory. weights: bytes on each rank."""
    from engine.run.check_machine import free_memory
    from engine.run.forward.memory import (
        PoolSizes,
        adapter_bytes,
        check_pool_bytes,
        default_cpu_kv_cache_bytes,
        divide_pool,
        fit_pool,
    )

    ranks = config.tensor_parallel_size
    free_bytes, owner = free_memory(config)
    adapters = adapter_bytes(config, dtype_bytes)
    memory = f"{free_bytes / GIB:.2f} GiB {owner}"
    left = free_bytes - weights - adapters
    beside_weights = (
        f", and {config.max_adapters} adapters {adapters / GIB:.2f} GiB" if adapters else ""
    )
    if left <= 0:
        text = f"the weights take {weights / GIB:.2f} GiB{beside_weights} on each rank, of {memory}"
        mend = "free memory, take a smaller model or dtype, or divide it (tensor_parallel_size)"
        if adapters:
            mend += "; or lower max_adapters"
        yield Observation("memory", "fault", text, mend)
        return
    check_pool_bytes(config, left, f"{memory} beside the weights")
    is_on_gpu = "GPU" in owner
    default = left if is_on_gpu else min(left, default_cpu_kv_cache_bytes(ranks))
    sizes = sizes or PoolSizes(_block_bytes(config, model, dtype_bytes), 0)
    most_tokens = min(
        config.max_model_len or model.max_position_embeddings, model.max_position_embeddings
    )
    num_blocks, states = divide_pool(sizes, config, left, default, most_tokens)
    longest = fit_pool(num_blocks, config, model.max_position_embeddings)
    beside = "" if states is None else f", {states} of {sizes.state / 2**20:.1f} MiB each"
    pool = config.kv_cache_bytes or default
    text = (
        f"weights {weights / GIB:.2f} GiB{beside_weights} and a KV pool of {pool / GIB:.2f} GiB on each rank, "
        f"of {memory}; {num_blocks * config.block_size} tokens in all, sequences of up to {longest}{beside}"
    )
    if pool <= left:
        yield Observation("memory", "ok", text)
    else:
        mend = "lower kv_cache_bytes, or free memory"
        yield Observation("memory", "warning", text, mend)


def weight_bytes(
    config: EngineConfig, model: ModelConfig, entries: list[TensorEntry], dtype_bytes: int
) -> int:
    """Return the bytes that the weights take at least; quantized ones are counted as they are stored."""
    from engine.models.loader import GUESSING

    read = [entry for entry in entries if not entry.name.startswith(GUESSING)]
    if model.quantization is not None:
        return sum(entry.end - entry.start for entry in read)
    size = 1 if config.quantization is not None else dtype_bytes
    return sum(prod(entry.shape) for entry in read) * size


def _block_bytes(config: EngineConfig, model: ModelConfig, dtype_bytes: int) -> int:
    """Return the bytes of a block on one rank, if every layer has the sizes that config.json names."""
    heads = max(1, model.num_kv_heads // config.tensor_parallel_size)
    size = dtype_bytes if config.kv_cache_dtype == "auto" else 1
    return 2 * config.block_size * model.num_layers * heads * model.head_dim * size
