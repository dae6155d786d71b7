"""Random LoRA adapters as PEFT saves them, and the checkpoints that they make when they are merged."""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.checkpoint.folder import list_weight_files
from engine.checkpoint.weights import open_tensors

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
STRENGTH = 0.3  # of random factors: an answer then differs within a few tokens


def make_adapter(
    folder: Path,
    model: Path,
    *,
    seed: int,
    rank: int = 4,
    targets: Iterable[str] = ALL,
    **values: Any,
) -> Path:
    """Write a random adapter for a checkpoint; return its folder. values: further ones of its configuration."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    with open_tensors(list_weight_files(model)) as found:
        for name, tensor in sorted(found.items()):
            module = name.removesuffix(".weight")
            if module == name or not module.endswith(tuple(targets)):
                continue
            num_out, num_in = tensor.shape
            for half, shape in (("A", (rank, num_in)), ("B", (num_out, rank))):
                numbers = torch.randn(shape, generator=generator) * STRENGTH
                tensors[f"base_model.model.{module}.lora_{half}.weight"] = numbers
    folder.mkdir(parents=True)
    config = {
        "peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "lora_dropout": 0.1, "bias": "none",
        "target_modules": list(targets), "task_type": "CAUSAL_LM", "inference_mode": True, "use_dora": False,
        "fan_in_fan_out": False, "modules_to_save": None, "init_lora_weights": True,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps({**config, **values}))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def merge(folder: Path, model: Path, adapter: Path) -> Path:
    """Write the checkpoint whose weights have the adapter's products in them, scaled by alpha over rank."""
    shutil.copytree(model, folder)
    config = json.loads((adapter / "adapter_config.json").read_text())
    tensors = load_file(model / "model.safetensors")
    parts = load_file(adapter / "adapter_model.safetensors")
    for name in parts:
        if not name.endswith("lora_A.weight"):
            continue
        product = parts[name.replace("lora_A", "lora_B")] @ parts[name]
        place = name.removeprefix("base_model.model.").replace("lora_A.", "")
        scale = config["lora_alpha"] / config["r"]
        tensors[place] = (tensors[place].float() + scale * product).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
