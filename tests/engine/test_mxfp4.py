"""Experts in MXFP4 are unpacked exactly, and parts of them as ranks divide them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine import (
    DamagedWeights,
    MissingWeights,
)
from engine.checkpoint.quantization import read_quantization
from engine.checkpoint.quantized import unpacked
from engine.checkpoint.weights import open_tensors
from tests.engine.quantizers import (
    mxfp4,
)


def test_experts_in_mxfp4_are_unpacked_exactly(tmp_path: Path) -> None:
    """And parts of them, in each dimension, as ranks and experts divide them."""
    weight = torch.randn(3, 64, 6, generator=torch.Generator().manual_seed(1)) * 0.1
    made = mxfp4(weight)
    assert ((made.weight - weight).abs() <= made.largest_error).all()
    name = "model.layers.0.mlp.experts.gate_up_proj"
    file = tmp_path / "model.safetensors"
    save_file({f"{name}_{part}": tensor for part, tensor in made.parts.items()}, file)
    quantization = read_quantization({"quantization_config": {"quant_method": "mxfp4"}})
    with open_tensors([file]) as tensors:
        (found,) = unpacked(tensors, quantization).values()
        assert found.name == name
        assert found.shape == (3, 64, 6)
        assert torch.equal(found.whole().float(), made.weight)
        for dim, start, length in [(0, 1, 2), (1, 32, 32), (1, 7, 40), (2, 3, 2)]:
            assert torch.equal(found.read(dim, start, length).float(), made.weight.narrow(dim, start, length))
        some = slice(1, 2), slice(5, 44), slice(2, 6)
        assert torch.equal(found.part(*some).float(), made.weight[some])
    made.parts["scales"][1, 2, 0] = 255
    save_file({f"{name}_{part}": tensor for part, tensor in made.parts.items()}, file)
    with open_tensors([file]) as tensors, pytest.raises(DamagedWeights, match=f"'{name}_scales'"):
        unpacked(tensors, quantization)[name].whole()
    save_file({f"{name}_blocks": made.parts["blocks"]}, file)
    with open_tensors([file]) as tensors, pytest.raises(MissingWeights, match=f"'{name}_scales'"):
        unpacked(tensors, quantization)
