"""The gated delta net: kernels give what chunks by matrix products give, and a token's bits whatever is beside it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine import ConfigError, UnsupportedModel
from engine.attention.state_pool import state_parts
from engine.checkpoint.model_config import read_model_config
from engine.layers.gated_delta_net import DeltaHeads, mix
from engine.layers.parallel import TensorParallel
from engine.models.decoder_config import read_decoder_config
from engine.models.registry import decoder_flags
from tests.engine.paged import DEVICE

CPU = torch.device("cpu")
#: The first two are those of the families, for which kernels are compiled anyway.
SHAPES = [
    DeltaHeads(2, 2, 16, 12, 4, 1e-6),
    DeltaHeads(3, 1, 16, 12, 3, 1e-5),
    DeltaHeads(1, 4, 32, 40, 2, 1e-6),
]
#: Two decodes; then a prompt with a snapshot, whose row another begins at; and a decode that makes a snapshot.
PARTS = [
    (0, 1, 3, 3, -1),
    (1, 2, 0, 0, -1),
    (2, 80, -1, 1, 5),
    (80, 150, 1, 1, -1),
    (150, 151, 5, 2, 6),
    (151, 160, 2, 2, -1),
]
Mix = Callable[..., Tensor]


def numba() -> Mix:
    pytest.importorskip(
        "numba", reason="numba is not installed, so the CPU kernels cannot be compiled"
    )
    from engine.cpu_kernels.delta_net import delta_net

    return delta_net


def triton() -> Mix:
    pytest.importorskip("triton", reason="triton is not installed, so its kernels cannot run")
    from engine.kernels.delta_net import delta_net

    return delta_net


class Case:
    """A layer's weights, states and input. Row 4 of the states is NaN, which nothing reads."""

    def __init__(
        self, heads: DeltaHeads, dtype: torch.dtype = torch.float32, num_tokens: int = 160
    ) -> None:
        generator = torch.Generator().manual_seed(0)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        per_head = (heads.num_heads, heads.group)
        self.heads = heads
        self.weights = (
            draw(heads.num_heads, heads.kernel_size, heads.num_channels),
            -draw(*per_head).abs(),
            draw(*per_head),
            draw(heads.value_dim),
        )
        self.x = draw(num_tokens, heads.num_heads * sum(heads.rows.values())).to(dtype)
        self.memory = [draw(8, *state.shape).to(state.dtype) for state in heads.states(0, dtype)]
        for kept in self.memory:
            kept[4] = torch.nan

    def run(
        self, how: Mix, parts: list[tuple[int, ...]], **changes: Any
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the output, and the states after."""
        device = DEVICE if how.__module__ == "engine.kernels.delta_net" else CPU
        memory = [kept.clone().to(device) for kept in self.memory]
        given, weights = (
            changes.get("x", self.x).to(device),
            tuple(weight.to(device) for weight in self.weights),
        )
        output = how(given, memory, state_parts(np.array(parts), device), weights, self.heads)
        return output.to(CPU), [kept.to(CPU) for kept in memory]


@pytest.mark.parametrize(
    ("heads", "dtype"), [(SHAPES[0], torch.bfloat16), *((heads, torch.float32) for heads in SHAPES)]
)
@pytest.mark.parametrize("kernel", [numba, triton])
def test_the_kernels_give_what_matrix_products_give(
    kernel: Callable[[], Mix], heads: DeltaHeads, dtype: torch.dtype
) -> None:
    how, case = kernel(), Case(heads, dtype)
    found, expected = case.run(how, PARTS), case.run(mix, PARTS)
    tolerance = 1e-4 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(found[0], expected[0], atol=tolerance, rtol=tolerance)
    for ours, theirs in zip(found[1], expected[1], strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4, equal_nan=True)


def hard_case(dtype: torch.dtype) -> Case:
    """Keys that are all alike and corrected at once, then some of the strongest decays among weak ones.

    The powers of what such tokens are to each other are as large as 1e8, their inverse is 1.
    """
    heads = DeltaHeads(1, 2, 16, 12, 4, 1e-6)
    case = Case(heads, dtype)
    rate, decay = case.x[:, -4:-2], case.x[:, -2:]
    case.x[:100, :32] = 1.0
    rate[:] = 30.0
    decay[:100] = -30.0
    decay[100:] = torch.where(torch.arange(60) % 7 == 0, 20000.0, -3.0)[:, None]
    return case


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_keys_and_strong_decays_lose_no_digits(dtype: torch.dtype) -> None:
    case, how = hard_case(dtype), triton()
    parts = [(0, 90, -1, 1, -1), (90, 97, 2, 2, 5), (97, 160, 5, 3, 6)]
    found, expected = case.run(how, parts), case.run(numba(), parts)
    tolerance = 1e-3 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(found[0], expected[0], atol=tolerance, rtol=tolerance)
    for ours, theirs in zip(found[1], expected[1], strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4, equal_nan=True)


@pytest.mark.parametrize("heads", SHAPES[:2])
def test_a_tokens_bits_do_not_depend_on_how_its_sequence_is_cut(heads: DeltaHeads) -> None:
    """Token by token as in one part, and beside other sequences."""
    case, last = Case(heads), 40
    whole, states = case.run(numba(), [(0, last, -1, 1, -1)])
    beside, other_states = case.run(numba(), [(0, last, -1, 1, -1), (last, 160, 0, 0, -1)])
    assert torch.equal(whole[:last], beside[:last])
    singly = [(i, i + 1, 1 if i else -1, 1, -1) for i in range(last)]
    cut, cut_states = case.run(numba(), singly)
    assert torch.equal(whole[:last], cut[:last])
    for all_states in (other_states, cut_states):
        for kept, expected in zip(all_states, states, strict=True):
            assert torch.equal(kept[1], expected[1])


def test_nothing_of_a_sequence_reaches_another() -> None:
    case, spoilt = Case(SHAPES[0]), Case(SHAPES[0])
    spoilt.x[1] = spoilt.x[150:] = torch.nan
    (clean, _), (found, states) = case.run(numba(), PARTS), spoilt.run(numba(), PARTS)
    assert torch.equal(found[2:150], clean[2:150])
    assert torch.equal(found[0], clean[0])
    assert [bool(states[1][row].isnan().any()) for row in range(7)] == [
        True,
        False,
        True,
        False,
        True,
        False,
        True,
    ]


SIZES = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "linear_num_value_heads": 16,
}


def read(folder: Path, **changes: Any) -> Any:
    (folder / "config.json").write_text(json.dumps({**SIZES, **changes}))
    model = read_model_config(folder)
    return read_decoder_config(model, decoder_flags(model.architecture))


@pytest.mark.parametrize(
    ("changes", "attending"),
    [
        ({}, [3]),
        ({"full_attention_interval": 3}, [2, 5]),
        ({"layer_types": ["full_attention", *["linear_attention"] * 5]}, [0]),
    ],
)
def test_layers_are_delta_nets_but_every_fourth(
    tmp_path: Path, changes: dict[str, Any], attending: list[int]
) -> None:
    """Or as config.json says."""
    decoder = read(tmp_path, **changes)
    assert [i for i, layer in enumerate(decoder.layers) if layer.delta is None] == attending
    assert decoder.ropes[0].rotary_dim == 4
    layers, states, _ = decoder.kept(TensorParallel(0, 2), torch.bfloat16)
    assert len(layers) == len(attending)
    assert {state.shape for state in states} == {(8, 3, 384), (8, 1, 128, 128)}


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        (
            {"hidden_act": "gelu_pytorch_tanh"},
            UnsupportedModel,
            "delta nets with hidden_act 'gelu_pytorch_tanh'",
        ),
        ({"linear_num_value_heads": 24}, ConfigError, "24 heads of values cannot share 16 of keys"),
        (
            {"layer_types": ["sliding_attention"] * 6},
            UnsupportedModel,
            "layers of type sliding_attention",
        ),
        ({"linear_key_head_dim": "wide"}, ConfigError, "linear_key_head_dim must be"),
    ],
)
def test_what_no_delta_net_can_have_is_named(
    tmp_path: Path, changes: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        read(tmp_path, **changes)


def test_ranks_that_cannot_share_the_heads_are_named(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="tensor_parallel_size=3: 16 key heads of a delta net cannot be shared"
    ):
        read(tmp_path, num_attention_heads=6, num_key_value_heads=3).kept(
            TensorParallel(0, 3), torch.float32
        )
