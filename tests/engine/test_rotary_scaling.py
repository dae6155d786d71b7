"""The frequencies of every kind of rotation are transformers' own, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Phi3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine.layers.rotary import RotaryEmbedding, apply_rotary
from engine.layers.rotary_scaling import SCALINGS, Rope

ORIGINAL = {"original_max_position_embeddings": 1024}
FACTORS = {
    "short_factor": [1.0 + i / 10 for i in range(24)],
    "long_factor": [1.5 + i / 3 for i in range(24)],
}
CASES: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 8.0},
    {"rope_type": "yarn", "factor": 4.0, **ORIGINAL},
    {"rope_type": "yarn", "factor": 40, "mscale": 1.2, "mscale_all_dim": 0.8, "beta_fast": 8, **ORIGINAL},
    {"rope_type": "yarn", "factor": 2.5, "attention_factor": 1.5, "truncate": False, **ORIGINAL},
    {"rope_type": "longrope", "factor": 2.0, "attention_factor": 1.25, **FACTORS, **ORIGINAL},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **ORIGINAL},
]


@pytest.mark.parametrize("longest", [512, 1024, 1025, 4096])
@pytest.mark.parametrize("theta", [10_000.0, 500_000.0, 70.0])
@pytest.mark.parametrize("case", CASES)
def test_frequencies_equal_transformers(case: dict[str, Any], theta: float, longest: int) -> None:
    config = LlamaConfig(
        hidden_size=192,
        num_attention_heads=4,
        max_position_embeddings=4096,
        rope_parameters={**case, "rope_theta": theta},
    )
    expected, expected_factor = ROPE_INIT_FUNCTIONS[case["rope_type"]](config, torch.device("cpu"), longest)
    frequencies, factor = Rope(case["rope_type"], 48, theta, 4096, case).frequencies(longest)
    assert torch.equal(frequencies, expected)
    assert factor == expected_factor


def test_every_kind_of_transformers_is_computed_or_named() -> None:
    """What it may learn next is refused until it is built: the set is no smaller than its own."""
    assert {case["rope_type"] for case in CASES} | {"default"} == set(SCALINGS)
    assert set(ROPE_INIT_FUNCTIONS) - set(SCALINGS) <= {"proportional"}


def test_a_part_of_each_head_turns() -> None:
    """As transformers turns it, Phi-3's partial rotation, with the magnitude of the longrope kind."""
    from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding, apply_rotary_pos_emb

    parameters = {"rope_type": "longrope", "short_factor": [1.0, 1.5, 2.0], "long_factor": [2.0, 3.0, 4.0]}
    config = Phi3Config(
        hidden_size=32,
        num_attention_heads=4,
        max_position_embeddings=256,
        original_max_position_embeddings=64,
        rope_parameters={**parameters, "rope_theta": 100.0, "partial_rotary_factor": 0.75},
        pad_token_id=0,
    )
    rope = Rope("longrope", 6, 100.0, 256, {**parameters, "original_max_position_embeddings": 64})
    query, key = torch.randn(2, 40, 4, 8, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(40)
    expected = apply_rotary_pos_emb(
        query[None], key[None], *Phi3RotaryEmbedding(config)(query, positions[None]), unsqueeze_dim=2
    )
    rotary = RotaryEmbedding(rope, 64, dtype=torch.float32, device=torch.device("cpu"))
    for heads, turned in zip((query, key), expected, strict=True):
        torch.testing.assert_close(apply_rotary(heads, *rotary(positions)), turned[0], rtol=0, atol=1e-6)
