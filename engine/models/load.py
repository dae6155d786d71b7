"""A checkpoint's folder to a model that is ready for its first step."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import torch

from engine.attention.base import KernelBackend
from engine.checkpoint.folder import list_weight_files
from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.text_part import text_tensors
from engine.checkpoint.weights import open_tensors
from engine.layers.parallel import TensorParallel
from engine.layers.rotary import RotaryEmbedding
from engine.layers.rotary_scaling import Rope
from engine.models.base import CausalModel
from engine.models.decoder import DecoderForCausalLM, DecoderParts
from engine.models.decoder_config import read_decoder_config
from engine.models.loader import load_weights
from engine.models.registry import decoder_flags

logger = logging.getLogger(__name__)


def check_supported(model: ModelConfig) -> None:
    """Raise UnsupportedModel, or another ConfigError, if no such model can be built; reads no weights."""
    read_decoder_config(model, decoder_flags(model.architecture))


def load_model(
    model_config: ModelConfig,
    folder: Path,
    *,
    tp: TensorParallel,
    backend: KernelBackend,
    max_positions: int,
    dtype: torch.dtype,
    device: torch.device,
) -> CausalModel:
    """Build the model, or one rank's share of it, and fill it from the folder.

    max_positions: tokens that no sequence will exceed.
    Raises UnsupportedModel, MissingWeights, WeightMismatch, DamagedWeights or another ConfigError.
    """
    config = read_decoder_config(model_config, decoder_flags(model_config.architecture))
    if model_config.is_text_part and config.tie_word_embeddings and _has_head(folder):
        config = replace(config, tie_word_embeddings=False)  # what transformers does: the default was wrong
    config = config.within(max_positions)
    for rope in config.ropes:
        _warn_of_long_factors(rope, max_positions)
    rotary_dtype = torch.float32 if config.flags.float32_rotation else dtype
    rotaries = [
        RotaryEmbedding(rope, max_positions, dtype=rotary_dtype, device=device) for rope in config.ropes
    ]
    parts = DecoderParts(config, tp, backend, dtype)
    with torch.device("meta"):
        model = DecoderForCausalLM(parts, rotaries)
    load_weights(
        model,
        folder,
        device,
        quantization=model_config.quantization,
        is_text_part=model_config.is_text_part,
    )
    return model.eval()


def _has_head(folder: Path) -> bool:
    """Whether the text part has an LM head of its own."""
    with open_tensors(list_weight_files(folder)) as tensors:
        return "lm_head.weight" in text_tensors(tensors)


def _warn_of_long_factors(rope: Rope, max_positions: int) -> None:
    """Say it where a longrope model's short sequences are not computed as by themselves."""
    if rope.kind != "longrope":
        return
    original = int(rope.number("original_max_position_embeddings"))
    if max_positions > original:
        logger.warning(
            "this model turns heads by other factors in sequences of more than %d tokens, and a KV cache "
            "cannot change factors while a sequence grows: all sequences have those of long ones; if %d "
            "tokens are enough, set max_model_len=%d", original, original, original,
        )  # fmt: skip
