"""Loads weights: puts every tensor of the checkpoint in its place, and sees that every place is filled."""

import logging
from collections.abc import Mapping, Sequence, Sized
from pathlib import Path
from typing import TypeVar

import torch

from engine.attention.layer_kernels import PackedKernels
from engine.checkpoint.folder import list_weight_files
from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.quantized import PackableTensor, unpacked
from engine.checkpoint.text_part import text_tensors
from engine.checkpoint.weights import CheckpointTensor, open_tensors
from engine.errors import MissingWeights, WeightMismatch
from engine.layers.int8 import QuantizeRows
from engine.layers.linear import ReplicatedLinear
from engine.layers.onednn import packs
from engine.layers.weighted_module import LoadPacked, WeightedModule
from engine.models.decoder import DecoderForCausalLM

#: The names here of modules that checkpoints may name otherwise.
RENAMED = {"block_sparse_moe": "mlp", "router": "gate", "linear_attn": "self_attn"}
#: Last names of modules in the checkpoint: the module that holds each here, and its shard there.
PACKED = {
    "q_proj": ("qkv_proj", "q"),
    "k_proj": ("qkv_proj", "k"),
    "v_proj": ("qkv_proj", "v"),
    "gate_proj": ("gate_up_proj", "gate"),
    "up_proj": ("gate_up_proj", "up"),
    **{f"in_proj_{shard}": ("in_proj", shard) for shard in ("qkv", "z", "b", "a", "qkvz", "ba")},
}
#: Endings of the names of tensors that older checkpoints hold, and that models compute themselves.
COMPUTED = ("rotary_emb.inv_freq",)
#: Prefixes of tensors that guess tokens ahead, which nothing here uses.
GUESSING = ("mtp.",)

BODY = "model."  # the prefix of all tensors, except the LM head's

logger = logging.getLogger(__name__)

Place = tuple[str, str | None]  # parameter name here, shard of it
T = TypeVar("T")


def own_names(tensors: Mapping[str, T], *, is_text_part: bool) -> dict[str, T]:
    """Give tensors the names that they have in a model with an LM head.

    A checkpoint for embeddings may lack the prefix "model.".
    """
    if is_text_part:
        return text_tensors(tensors)
    if "embed_tokens.weight" not in tensors:
        return dict(tensors)
    return {
        name if name.startswith("lm_head.") else BODY + name: tensor
        for name, tensor in tensors.items()
    }


def load_weights(
    model: DecoderForCausalLM,
    folder: Path,
    device: torch.device,
    config: ModelConfig,
    quantize_rows: QuantizeRows | None = None,
    kernels: PackedKernels | None = None,
) -> None:
    """Move `model` from the meta device to `device` and fill it from the folder's safetensors files.

    quantize_rows: quantizes the activations of linear layers, whose weights are then int8; None quantizes nothing.
    kernels: multiply with weights as the files pack them; None unpacks all weights.
    Raises MissingWeights if a parameter is not in the checkpoint, WeightMismatch if a tensor has another
    shape than its place or no place at all, DamagedWeights for a quantized one that cannot be unpacked.
    """
    files = list_weight_files(folder)
    modules = weighted_modules(model)
    missing = {
        (f"{name}.{parameter}", shard)
        for name, module in modules.items()
        for parameter, _ in module.named_parameters(recurse=False)
        for shard in module.shards_of(parameter)
    }
    if model.tied:
        missing.discard(("lm_head.weight", None))
    with open_tensors(files) as tensors:
        opened = unpacked(tensors, config.quantization)
        by_name = own_names(opened, is_text_part=config.is_text_part)
        packed, plain_modules = keep_packed(modules, by_name, kernels)
        _log_packed(packed, plain_modules)
        # The same as to_empty, which takes a third of a second to import sympy for tensors on the meta device.
        model._apply(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device=device))  # type: ignore[no-untyped-call]
        model.tie_weights()
        for name, tensor in by_name.items():
            if name == "lm_head.weight" and model.tied:
                continue  # the hub writes it although it repeats the embedding
            if not name.endswith(COMPUTED) and not name.startswith(GUESSING):
                missing.difference_update(_load_tensor(modules, packed, name, tensor))
    if missing:
        names = sorted(f"{name} ({shard})" if shard else name for name, shard in missing)
        listed = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
        raise MissingWeights(
            f"{folder} lacks {len(names)} tensors the model needs: {listed}; fetch it again"
        )
    for module in modules.values():
        if quantize_rows is not None and isinstance(module, ReplicatedLinear):
            module.quantize(quantize_rows)
        module.finish_loading()


def weighted_modules(model: DecoderForCausalLM) -> dict[str, WeightedModule]:
    """Return the modules that are filled from a checkpoint, by name."""
    return {
        name: module for name, module in model.named_modules() if isinstance(module, WeightedModule)
    }


def count_bytes(
    model: DecoderForCausalLM,
    folder: Path,
    device: torch.device,
    config: ModelConfig,
    kernels: PackedKernels | None,
) -> int:
    """Return the bytes that a model's weights take once `load_weights` has loaded them, by their shapes alone.

    model: on the meta device; this changes it.
    """
    modules = weighted_modules(model)
    with open_tensors(list_weight_files(folder)) as tensors:
        plain = unpacked(tensors, config.quantization)
        keep_packed(modules, own_names(plain, is_text_part=config.is_text_part), kernels)
    for module in modules.values():
        module.finish_loading()
    weights = [
        parameter for name, parameter in model.named_parameters() if name != "lm_head.weight"
    ]
    head = model.lm_head.weight
    if not model.tied or packs(device, head.dtype):  # a packed head is a copy of the embedding
        weights.append(head)
    return sum(weight.nbytes for weight in weights)


def keep_packed(
    modules: Mapping[str, WeightedModule],
    tensors: Mapping[str, CheckpointTensor],
    kernels: PackedKernels | None,
) -> tuple[dict[tuple[str, str], LoadPacked], list[str]]:
    """Let layers keep quantized weights as the files pack them, where the kernels can multiply with packed weights.

    modules: not filled yet; they may be on the meta device. tensors: by their names in this model.
    Returns the function that loads each weight that stays packed, by module and parameter, and the names of modules
    with a weight that must be unpacked.
    """
    by_place: dict[tuple[str, str], dict[str | None, PackableTensor]] = {}
    for name, tensor in tensors.items():
        place = _find_place(modules, name) if isinstance(tensor, PackableTensor) else None
        if place is not None and isinstance(tensor, PackableTensor):
            module_name, parameter, shard = place
            by_place.setdefault((module_name, parameter), {})[shard] = tensor
    packed: dict[tuple[str, str], LoadPacked] = {}
    plain: list[str] = []
    for (module_name, parameter), by_shard in by_place.items():
        load_packed = None
        if kernels is not None:
            load_packed = modules[module_name].keep_packed(parameter, by_shard, kernels)
        if load_packed is None:
            plain.append(module_name)
        else:
            packed[module_name, parameter] = load_packed
    return packed, plain


def _log_packed(packed: Sized, plain: Sequence[str]) -> None:
    if packed:
        logger.info("the quantized weights of %d layers stay packed in memory", len(packed))
    if plain:
        logger.info(
            "the quantized weights of %d layers are unpacked when they are read, and then take as much memory as "
            "plain weights: %s",
            len(plain),
            ", ".join(plain[:4]) + (", ..." if len(plain) > 4 else ""),
        )


def _load_tensor(
    modules: dict[str, WeightedModule],
    packed: Mapping[tuple[str, str], LoadPacked],
    name: str,
    tensor: CheckpointTensor,
) -> list[Place]:
    """Load one tensor; return the places filled. packed: as `keep_packed` returns it."""
    place = _find_place(modules, name)
    if place is None:
        weight = name.removesuffix("bias") + "weight"
        if name.endswith(".bias") and _find_place(modules, weight) and not tensor.whole().any():
            return []  # AutoGPTQ writes a bias of zeros for a linear layer without a bias
        raise WeightMismatch(f"{tensor.path} holds {name!r}, for which this model has no place")
    module_name, parameter, shard = place
    module = modules[module_name]
    try:
        load_packed = packed.get((module_name, parameter))
        if load_packed is not None and isinstance(tensor, PackableTensor):
            load_packed(tensor, shard)
        else:
            module.load(parameter, tensor, shard)
    except WeightMismatch as error:
        raise WeightMismatch(
            f"{name!r} in {tensor.path} does not fit config.json: {error}"
        ) from error
    shards = module.shards_of(parameter) if shard is None else (shard,)
    return [(f"{module_name}.{parameter}", filled) for filled in shards]


def _find_place(
    modules: Mapping[str, WeightedModule], name: str
) -> tuple[str, str, str | None] | None:
    """Find a tensor's module, parameter and shard; None for a tensor that no module has."""
    parts = [RENAMED.get(part, part) for part in name.split(".")]
    for end in range(len(parts) - 1, 0, -1):  # the innermost module first
        *parents, last = parts[:end]
        own_last, shard_of_module = PACKED.get(last, (last, None))
        module_name = ".".join([*parents, own_last])
        if module_name in modules:
            place = modules[module_name].place_of(".".join(parts[end:]))
            if place is None:
                return None
            parameter, shard_of_parameter = place
            return module_name, parameter, shard_of_module or shard_of_parameter
    return None
