"""Replaces the forward of attention modules that do not call transformers' attention interface.

To add one: a function here that takes its forward's arguments and calls `answer`, and an entry in FORWARDS.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from engine.models.attention_calls import PLACE, answer


def put_in_place(model: nn.Module) -> None:
    """Let each module of the classes in FORWARDS attend by `answer`, while the module has a function to answer with."""
    for module in model.modules():
        if type(module).__name__ in FORWARDS:
            _replace(module, FORWARDS[type(module).__name__])


def reference_attention(model: nn.Module) -> str:
    """Return the name of transformers' attention to compare ours with.

    It is "eager", except for Falcon, whose "eager" adds the ALiBi slopes twice.
    """
    names = {type(module).__name__ for module in model.modules()}
    return "sdpa" if "FalconAttention" in names else "eager"


def _replace(module: Any, ours: Callable[..., Any]) -> None:
    original = module.forward
    module.forward = lambda *args, **options: (
        ours(module, *args, **options) if PLACE in module.__dict__ else original(*args, **options)
    )


def _bloom(
    module: Any, hidden: Tensor, residual: Tensor, alibi: Tensor, attention_mask: Tensor, **_: Any
) -> Any:
    query, key, value = module._reshape(module.query_key_value(hidden))
    options = {"scaling": module.inv_norm_factor, "alibi": alibi * module.beta}
    attended, _weights = answer(module, query, key, value, attention_mask, **options)
    return module.dense(attended.flatten(2)) + residual, None


def _mpt(
    module: Any,
    hidden: Tensor,
    position_bias: Tensor | None,
    attention_mask: Tensor | None = None,
    **_: Any,
) -> Any:
    mixed = module.Wqkv(hidden)
    if module.clip_qkv:
        mixed = mixed.clamp(-module.clip_qkv, module.clip_qkv)
    query, key, value = (
        part.unflatten(2, (module.n_heads, -1)).transpose(1, 2) for part in mixed.chunk(3, dim=2)
    )
    options = {"scaling": module.softmax_scale, "alibi": position_bias}
    attended, _weights = answer(module, query, key, value, attention_mask, **options)
    return module.out_proj(attended.flatten(2)), None


def _falcon(
    module: Any,
    hidden: Tensor,
    alibi: Tensor | None,
    attention_mask: Tensor | None,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    **_: Any,
) -> Any:
    parts = module._split_heads(module.query_key_value(hidden))
    query, key, value = (part.transpose(1, 2) for part in parts)
    repeated = key.shape[1] // module.num_kv_heads
    if alibi is None:
        rotate = sys.modules[type(module).__module__].apply_rotary_pos_emb
        assert position_embeddings is not None
        query, key = rotate(query, key, *position_embeddings)
    else:
        alibi = alibi * module.inv_norm_factor
        if attention_mask is not None:
            # The mask holds the slopes too, so only its hidden places are kept.
            attention_mask = attention_mask > torch.finfo(attention_mask.dtype).min
    options = {"scaling": module.inv_norm_factor, "alibi": alibi}
    attended, _weights = answer(
        module, query, key[:, ::repeated], value[:, ::repeated], attention_mask, **options
    )
    return module.dense(attended.flatten(2)), None


FORWARDS: dict[str, Callable[..., Any]] = {
    "BloomAttention": _bloom,
    "FalconAttention": _falcon,
    "MptAttention": _mpt,
}
