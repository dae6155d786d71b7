"""Loads a checkpoint's folder into a model that is ready for its first step."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from reprlib import repr as brief  # short

import torch

from engine.attention.layer_kernels import PackedKernels
from engine.checkpoint.folder import list_weight_files
from engine.checkpoint.heads import CLASSIFIES, reads_in_one_pass
from engine.checkpoint.model_config import (
    ModelConfig,
    longrope_length,
    read_json,
    read_model_config,
)
from engine.checkpoint.weights import open_tensors
from engine.errors import ConfigError, UnsupportedModel
from engine.layers.int8 import Int8Product, check_int8, quantize_rows
from engine.layers.rotary import RotaryEmbedding
from engine.models.base import CausalModel, ModelPlace
from engine.models.decoder import DecoderForCausalLM, DecoderParts
from engine.models.decoder_config import DecoderConfig, read_decoder_config
from engine.models.deterministic import check_deterministic, make_deterministic
from engine.models.loader import count_bytes, load_weights, own_names
from engine.models.registry import BODIES, decoder_flags
from engine.models.served import refuse_known
from engine.models.transformers_model import load_transformers_model

logger = logging.getLogger(__name__)


def read_supported(folder: Path, model_path: str) -> tuple[ModelConfig, ModelPath]:
    """Return the configuration of a folder's model, and how to compute it; reads no weights.

    model_path: as EngineConfig has it. Raises UnsupportedModel or another ConfigError.
    """
    values = read_json(folder / "config.json")
    architectures = values.get("architectures")
    name = str(architectures[0]) if isinstance(architectures, list) and architectures else ""
    # Refuse the architecture first: config.json may have other names for the sizes, and an error would be about them.
    if values.get("is_encoder_decoder") and not reads_in_one_pass(name):
        raise UnsupportedModel(
            f"{brief(architectures)} has an encoder; decoders alone are served, which `tokenmill models` lists"
        )
    if model_path != "transformers":
        refuse_known(name)
    model = read_model_config(folder)
    return model, choose_path(model, model_path)


def generates(folder: Path, model: ModelConfig, path: ModelPath, *, embeds: bool) -> bool:
    """Whether a checkpoint can generate text. Raises UnsupportedModel if it can neither generate nor embed."""
    if path.is_single_pass:
        has_head = False
        embeds = embeds or model.architecture.endswith(CLASSIFIES)
    else:
        has_head = _has_lm_head(folder, model, path)
    if not has_head and not embeds and (path.is_single_pass or model.architecture in BODIES):
        raise UnsupportedModel(
            f"{model.architecture} has no LM head, so it can only embed, and no modules.json beside its "
            "weights says how; add that file, or set pooling"
        )
    return has_head


def _has_lm_head(folder: Path, model: ModelConfig, path: ModelPath) -> bool:
    has_head = path.decoder is None or (
        path.decoder.tie_word_embeddings and model.architecture not in BODIES
    )
    if not has_head:
        with open_tensors(list_weight_files(folder)) as tensors:
            # A quantized head may have no tensor lm_head.weight, so every name of the head counts.
            names = own_names(tensors, is_text_part=model.is_text_part)
            has_head = any(name.startswith("lm_head.") for name in names)
    return has_head


@dataclass(frozen=True)
class ModelPath:
    """The way in which a model is computed, and the reason for it.

    decoder: the native decoder's configuration; None for a model that runs through transformers.
    is_single_pass: the model reads each text as a whole, without a KV cache.
    """

    decoder: DecoderConfig | None
    reason: str
    is_single_pass: bool = False

    def __str__(self) -> str:
        """Return "runs ...", for a log."""
        return (
            "runs natively"
            if self.decoder is not None
            else f"runs through transformers: {self.reason}"
        )


def choose_path(model: ModelConfig, wanted: str) -> ModelPath:
    """Choose how a model is computed. wanted: as EngineConfig.model_path.

    Raises UnsupportedModel or another ConfigError if nothing here computes it.
    """
    is_single_pass = reads_in_one_pass(model.whole or model.architecture)
    if is_single_pass and model.whole is not None:
        raise UnsupportedModel(
            f"{model.whole} has no LM head, and reads more than text: such models are not built"
        )
    if model.reads_pictures:
        return ModelPath(None, "it reads pictures", is_single_pass)
    if wanted == "transformers":
        return ModelPath(None, "model_path='transformers' says so", is_single_pass)
    try:
        decoder = read_decoder_config(model, decoder_flags(model.architecture))
    except UnsupportedModel as error:
        if wanted == "native":
            hint = "model_path='native' is set, 'auto' tries transformers"
            raise UnsupportedModel(f"{error}; {hint}") from error
        return ModelPath(
            None, "it reads texts in one pass" if is_single_pass else str(error), is_single_pass
        )
    return ModelPath(decoder, f"{model.architecture} is native")


def load_model(
    config: ModelConfig,
    folder: Path,
    place: ModelPlace,
    *,
    model_path: str,
    quantization: str | None = None,
    embeds: bool = False,
    deterministic: bool = False,
) -> CausalModel:
    """Build the model, or one rank's share of it, and fill it from the folder.

    embeds: the model is only to embed, so it needs no LM head.
    Raises UnsupportedModel, MissingWeights, WeightMismatch, DamagedWeights or another ConfigError.
    """
    path = choose_path(config, model_path)
    if deterministic:
        check_deterministic(config.architecture, path.decoder, place.tp)
    if quantization is not None:
        _check_quantization(config.architecture, path, place.device)
    if path.decoder is None:
        return load_transformers_model(config, folder, place)
    ties = _ties_head(folder, config, path.decoder, embeds=embeds)
    decoder = replace(path.decoder, tie_word_embeddings=ties).within(place.max_positions)
    original = longrope_length(config)
    if original is not None and place.max_positions > original:
        logger.warning(
            "this model has other rotary factors for sequences of more than %d tokens, and a KV cache cannot "
            "change factors while a sequence grows: all sequences take the factors of long ones; if %d tokens "
            "are enough, set max_model_len=%d", original, original, original,
        )  # fmt: skip
    rotation_dtype = torch.float32 if decoder.flags.float32_rotation else place.dtype
    rotaries = [
        RotaryEmbedding(rope, place.max_positions, dtype=rotation_dtype, device=place.device)
        for rope in decoder.ropes
    ]
    kernels = place.backend.layer_kernels
    with torch.device("meta"):
        model = DecoderForCausalLM(
            DecoderParts(decoder, place.tp, place.backend, place.dtype), rotaries
        )
    row_quantizer = None
    packed_kernels = None
    if quantization is not None:
        own_quantizer = None if kernels is None else kernels.quantize_rows
        row_quantizer = own_quantizer or quantize_rows
    elif not deterministic:
        packed_kernels = _packed_kernels(place)
    load_weights(model, folder, place.device, config, row_quantizer, packed_kernels)
    if deterministic:
        make_deterministic(model, place.dtype)
    if quantization is not None:
        logger.info(
            "int8: the weights of %d linear layers by output channel, activations by token; embedding, LM "
            "head and KV cache stay in %s",
            sum(isinstance(module, Int8Product) for module in model.modules()),
            str(place.dtype).removeprefix("torch."),
        )
    return model.eval()


def count_weight_bytes(
    config: ModelConfig,
    folder: Path,
    decoder: DecoderConfig,
    place: ModelPlace,
    *,
    deterministic: bool = False,
) -> int:
    """Return the bytes that one rank's weights of a native model will take, by shapes alone."""
    ties = _ties_head(folder, config, decoder, embeds=False)
    decoder = replace(decoder, tie_word_embeddings=ties)
    with torch.device("meta"):
        model = DecoderForCausalLM(DecoderParts(decoder, place.tp, place.backend, place.dtype), [])
    kernels = None if deterministic else _packed_kernels(place)
    return count_bytes(model, folder, place.device, config, kernels)


def _packed_kernels(place: ModelPlace) -> PackedKernels | None:
    kernels = place.backend.layer_kernels
    return None if kernels is None else kernels.packed


def _ties_head(folder: Path, config: ModelConfig, decoder: DecoderConfig, *, embeds: bool) -> bool:
    """Return whether the LM head and the embedding are one tensor.

    If config.json says so but the files hold two different tensors, the files are right, as in transformers.
    embeds: the model needs no LM head, so a missing one counts as tied.
    """
    with open_tensors(list_weight_files(folder)) as tensors:
        by_name = own_names(tensors, is_text_part=config.is_text_part)
        if not any(name.startswith("lm_head.") for name in by_name):
            return embeds or decoder.tie_word_embeddings
        head = by_name.get("lm_head.weight")
        embedding = by_name.get("model.embed_tokens.weight")
        if not decoder.tie_word_embeddings or head is None or embedding is None:
            return decoder.tie_word_embeddings
        return head.shape == embedding.shape and torch.equal(head.whole(), embedding.whole())


def _check_quantization(name: str, path: ModelPath, device: torch.device) -> None:
    """Raise ConfigError unless quantization='int8' is built for this model and device."""
    problem = None
    if device.type != "cpu":
        problem = f"device={device.type!r}, and int8 is built for CPUs"
    elif path.decoder is None:
        problem = f"{name} runs through transformers, and int8 is built for native models"
    elif any(layer.experts for layer in path.decoder.layers):
        problem = "this is a mixture of experts, and int8 is built for dense models"
    if problem is not None:
        raise ConfigError(f"quantization='int8' cannot be used: {problem}; leave it out")
    check_int8()
