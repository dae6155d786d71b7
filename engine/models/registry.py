"""Which architectures are served, and with which flags of the decoder."""

from __future__ import annotations

from engine.errors import UnsupportedModel
from engine.models.decoder_config import DecoderFlags

ARCHITECTURES = {
    "Qwen3ForCausalLM": DecoderFlags(qk_norm=True),
}


def decoder_flags(architecture: str) -> DecoderFlags:
    """The flags that make the decoder this architecture. Raises UnsupportedModel."""
    if architecture not in ARCHITECTURES:
        raise UnsupportedModel(
            f"architecture {architecture!r} is not supported; supported: {', '.join(sorted(ARCHITECTURES))}"
        )
    return ARCHITECTURES[architecture]
