"""Loading weights: every tensor of the checkpoint to its place, every place filled."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from engine.checkpoint.folder import list_weight_files
from engine.checkpoint.weights import CheckpointTensor
from engine.errors import MissingWeights, WeightMismatch
from engine.layers.base import WeightedModule
from engine.models.decoder import DecoderForCausalLM

#: Ends of the names of tensors that older checkpoints hold and models compute themselves.
COMPUTED = ("rotary_emb.inv_freq",)

Place = tuple[str, str | None]  # parameter name here, shard of it


def load_weights(model: DecoderForCausalLM, folder: Path, device: torch.device) -> None:
    """Move `model` from the meta device to `device` and fill it from the folder's safetensors files.

    Of a tensor that is split over ranks, only this rank's share is read.
    Raises MissingWeights if a parameter is not in the checkpoint, WeightMismatch if a tensor has another
    shape than its place or no place at all.
    """
    files = list_weight_files(folder)
    model.to_empty(device=device)
    model.tie_weights()
    modules = {name: module for name, module in model.named_modules() if isinstance(module, WeightedModule)}
    missing = {
        (f"{name}.{parameter}", shard)
        for name, module in modules.items()
        for parameter, _ in module.named_parameters(recurse=False)
        for shard in module.shards
    }
    if model.tied:
        missing.discard(("lm_head.weight", None))
    for path in files:
        missing.difference_update(_load_file(model, modules, path))
    if missing:
        names = sorted(f"{name} ({shard})" if shard else name for name, shard in missing)
        shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
        raise MissingWeights(f"{folder} lacks {len(names)} tensors the model needs: {shown}; fetch it again")
    for module in modules.values():
        module.finish_loading()


def _load_file(model: DecoderForCausalLM, modules: dict[str, WeightedModule], path: Path) -> list[Place]:
    """Load each tensor of one file; return the places filled."""
    filled = []
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - the file object is no mapping
                if name == "lm_head.weight" and model.tied:
                    continue  # the hub writes it although it repeats the embedding
                if name.endswith(COMPUTED):
                    continue
                tensor = CheckpointTensor(file, name)
                filled.extend(_load_tensor(model.packed, modules, name, tensor, path))
    except SafetensorError as error:
        raise MissingWeights(f"{path} is no complete safetensors file ({error}); fetch it again") from error
    return filled


def _load_tensor(
    packed: dict[str, tuple[str, str]],
    modules: dict[str, WeightedModule],
    name: str,
    tensor: CheckpointTensor,
    path: Path,
) -> list[Place]:
    prefix, _, parameter = name.rpartition(".")
    parent, _, last = prefix.rpartition(".")
    shard = None
    if last in packed:
        last, shard = packed[last]
    module_name = f"{parent}.{last}" if parent else last
    module = modules.get(module_name)
    if module is None or parameter not in dict(module.named_parameters(recurse=False)):
        raise WeightMismatch(f"{path} holds {name!r}, for which this model has no place")
    try:
        module.load(parameter, tensor, shard)
    except WeightMismatch as error:
        raise WeightMismatch(f"{name!r} in {path} does not fit config.json: {error}") from error
    return [(f"{module_name}.{parameter}", each) for each in (module.shards if shard is None else (shard,))]
