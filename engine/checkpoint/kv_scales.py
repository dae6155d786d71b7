"""The scales that a checkpoint brings for an FP8 KV cache. A key or a value is a stored number times its scale."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as brief  # short
from typing import TYPE_CHECKING

from engine.checkpoint.folder import list_weight_files
from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.text_part import text_name
from engine.errors import WeightMismatch

if TYPE_CHECKING:
    from torch import Tensor

    from engine.checkpoint.weights import CheckpointTensor

#: compressed-tensors and AutoFP8 name a scale `self_attn.k_scale`, ModelOpt `self_attn.k_proj.k_scale`, Quark
#: `self_attn.k_proj.output_scale`. In the oldest checkpoints `kv_scale` is for keys and values.
NAME = re.compile(r"\blayers\.(\d+)\.(?:\w+\.)+?(?:(k|v|kv)_scale|(k|v)_proj\.output_scale)")
OWN_PREFIXES = ("", "model.")  # others belong to layers that draft tokens
#: The values that kv_cache_scheme may have, as compressed-tensors and ModelOpt write it. None: it may lack the key.
SCHEME = {
    "type": ("float",),
    "num_bits": (8,),
    "dynamic": (None, False),
    "symmetric": (None, True),
    "strategy": (None, "tensor", "attn_head"),
}
AUTO_FP8_SCHEME = "static"  # AutoFP8 writes it in place of a scheme

#: A layer's number among the model's layers, and "k" for its keys or "v" for its values.
Side = tuple[int, str]


@dataclass(frozen=True)
class KVScale:
    """The stored scale of a layer's keys or values. values: [1] for all heads, or [kv_heads]; float32."""

    name: str
    path: Path
    values: Tensor

    def of_heads(self, num_kv_heads: int) -> Tensor:
        """Return a scale for each of the model's KV heads. Raises WeightMismatch for another number."""
        if len(self.values) not in (1, num_kv_heads):
            raise WeightMismatch(
                f"{self.name!r} in {self.path} has {len(self.values)} scales; expected 1 for all heads, or "
                f"{num_kv_heads}, one for each KV head; fetch it again, or leave kv_cache_dtype out"
            )
        return self.values.expand(num_kv_heads)


def is_kv_scale(name: str) -> bool:
    """Return whether a tensor of this name is a scale of a KV cache."""
    return _match_scale(name) is not None


def scheme_problem(config: ModelConfig) -> str | None:
    """Return why the checkpoint's scales are not for an FP8 cache; None if they are, or if config.json says nothing."""
    section = config.values.get("quantization_config") or {}
    scheme = section.get("kv_cache_scheme")
    if scheme is None or scheme == AUTO_FP8_SCHEME:
        return None
    if not isinstance(scheme, Mapping):
        return f"kv_cache_scheme {brief(scheme)}"
    for key, allowed in SCHEME.items():
        if scheme.get(key) not in allowed:
            return f"kv_cache_scheme with {key} {brief(scheme.get(key))}"
    return None


def find_kv_scales(names: Iterable[str], config: ModelConfig) -> dict[Side, str]:
    """Find the name of each scale among the names of all tensors.

    Returns {} if config.json says that the scales are for another kind of cache.
    """
    found: dict[Side, str] = {}
    # with a KV LoRA rank (DeepSeek), scales are for compressed keys and values; our cache holds those of each head
    if scheme_problem(config) is not None or config.values.get("kv_lora_rank"):
        return found
    of_both: dict[Side, str] = {}
    for name in names:
        own_name = text_name(name) if config.is_text_part else name
        match = None if own_name is None else _match_scale(own_name)
        if match is None:
            continue
        layer = int(match[1])
        if match.string[: match.start()] not in OWN_PREFIXES or layer >= config.num_layers:
            continue
        side = match[2] or match[3]
        if side == "kv":
            of_both |= {(layer, "k"): name, (layer, "v"): name}
        else:
            found[layer, side] = name
    return of_both | found  # a scale for keys alone, or for values alone, replaces one for both


def read_kv_scales(folder: Path, config: ModelConfig) -> dict[Side, KVScale]:
    """Read the scales that the checkpoint brings. Raises DamagedWeights for a scale that is not finite and above 0."""
    # the identity of a model needs the names alone, and no torch
    from engine.checkpoint.weights import open_tensors

    with open_tensors(list_weight_files(folder)) as tensors:
        return {
            side: _read(tensors[name]) for side, name in find_kv_scales(tensors, config).items()
        }


def _match_scale(name: str) -> re.Match[str] | None:
    """Return the match of a scale's name, which ends where the name ends; None for other names."""
    match = NAME.search(name)
    if match is None or match.end() != len(name):
        return None
    return match


def _read(tensor: CheckpointTensor) -> KVScale:
    from engine.checkpoint.packed_form import damaged

    values = tensor.whole().float().flatten()
    if not values.isfinite().all() or not (values > 0).all():
        raise damaged(tensor, "holds scales of the KV cache that are not finite and above 0")
    return KVScale(tensor.name, tensor.path, values)
