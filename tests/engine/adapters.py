"""Random LoRA adapters as PEFT saves them, the checkpoints they make when merged, and what an engine answers."""

import json
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine import Completion, Engine, EngineConfig, SamplingParams
from engine.checkpoint.folder import list_weight_files
from engine.checkpoint.weights import open_tensors
from tests.engine.checkpoints import Shape, make_checkpoint, pool_bytes
from tests.engine.reference import NUM_NEW_TOKENS, Reference, mixed_prompts

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
STRENGTH = 0.3  # of random factors: an answer then differs within a few tokens

SHAPE = Shape("for_adapters", num_heads=4, num_kv_heads=2, attention_bias=True, seed=7)
GREEDY = SamplingParams(max_tokens=NUM_NEW_TOKENS, temperature=0.0, ignore_eos=True)
NAMES = (None, "all", "attention", "mlp")
PROMPTS = mixed_prompts(seed=5)[:10]


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


@dataclass(frozen=True)
class Stage:
    """A model, a folder of adapters, and what transformers says of the model with each of them merged."""

    model: Path
    adapters: Path
    references: dict[str | None, Reference]

    def config(self, **changes: Any) -> EngineConfig:
        values: dict[str, Any] = {
            "dtype": "float32", "max_model_len": 200, "max_num_seqs": 16, "max_num_batched_tokens": 64,
            "kv_cache_bytes": pool_bytes(SHAPE, 200), "adapters": str(self.adapters),
        }  # fmt: skip
        return EngineConfig(str(self.model), **{**values, **changes})


def make_stage(root: Path) -> Stage:
    """Make a random model below `root` with an adapter for each of NAMES."""
    model = make_checkpoint(root / "model", SHAPE)
    folder = root / "folder"
    make_adapter(folder / "all", model, seed=1)
    make_adapter(folder / "attention", model, seed=2, rank=3, targets=ALL[:4:2] + ALL[3:4])
    make_adapter(folder / "mlp", model, seed=3, rank=8, targets=("up_proj", "down_proj"))
    references: dict[str | None, Reference] = {None: Reference(model, PROMPTS)}
    for name in NAMES[1:]:
        assert name is not None
        references[name] = Reference(merge(root / f"{name}-merged", model, folder / name), PROMPTS)
    return Stage(model, folder, references)


def ask(engine: Engine, prompt: list[int], adapter: str | None, **changes: Any) -> Completion:
    """Return the greedy completion of one prompt."""
    (completion,) = engine.generate([prompt], replace(GREEDY, adapter=adapter, **changes))
    return completion


def check_answers(stage: Stage, engine: Engine) -> None:
    """Check each prompt with each adapter, in an order in which neighbours have different ones."""
    prompts = []
    params = []
    for prompt in PROMPTS:
        for name in NAMES:
            prompts.append(prompt)
            params.append(replace(GREEDY, adapter=name))
    completions = engine.generate(prompts, params)
    for number, name in enumerate(NAMES):
        assert stage.references[name].unexplained(completions[number :: len(NAMES)]) == []
    texts = {tuple(completion.token_ids) for completion in completions[: len(NAMES)]}
    assert len(texts) == len(NAMES), "the adapters must differ, or this test would see nothing"
