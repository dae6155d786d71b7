"""Mixtures of experts: each way to multiply equals plain float64, each variant transformers' own layer."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import GptOssConfig, MixtralConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from engine.attention.layer_kernels import ExpertKernels, LayerKernels
from engine.checkpoint.weights import open_tensors
from engine.layers.grouped_linear import ExpertGroups, GroupedLinear
from engine.layers.moe import Experts, SparseMLP, choose_experts
from engine.layers.parallel import TensorParallel
from tests.engine.paged import DEVICE

HIDDEN, COLUMNS, NUM_EXPERTS, NUM_CHOSEN = 40, 24, 6, 3
NORMALISED = Experts(NUM_EXPERTS, NUM_CHOSEN, COLUMNS, normalised=True)
VARIANTS = {
    "mixtral": NORMALISED,
    "qwen3_moe": NORMALISED,
    "qwen3_moe, not normalised": replace(NORMALISED, normalised=False),
    "gpt_oss": replace(NORMALISED, bias=True, swiglu=(1.702, 7.0), interleaved=True),
}
WAYS = ("one by one", "triton")


@pytest.fixture(params=WAYS)
def kernels(request: pytest.FixtureRequest) -> LayerKernels | None:
    """None for plain torch, one expert after the other."""
    if request.param != "triton":
        return None
    pytest.importorskip("triton", reason="triton is not installed, so its kernels cannot run")
    from engine.attention.triton_backend import TritonBackend

    return TritonBackend(DEVICE).layer_kernels


def device_of(kernels: LayerKernels | None) -> torch.device:
    """Where that way is tried: Triton's on the GPU if there is one."""
    return torch.device("cpu") if kernels is None else DEVICE


def of_experts(kernels: LayerKernels | None) -> ExpertKernels | None:
    return None if kernels is None else kernels.experts


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# Products


def products(linear: GroupedLinear, x: Tensor, bias: Tensor | None, counts: list[int]) -> Tensor:
    """Of rows of which each expert has so many; on the linear layer's device, and back."""
    device = next(linear.parameters()).device
    experts = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)).to(device)
    groups = ExpertGroups.of(experts.unsqueeze(1), len(counts))
    return linear(x.to(device), None if bias is None else bias.to(device), groups).cpu()


def make_linear(weight: Tensor, kernels: LayerKernels | None) -> GroupedLinear:
    parameter = nn.Parameter(weight.to(device_of(kernels), copy=True), requires_grad=False)
    return GroupedLinear(parameter, of_experts(kernels))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("counts", "in_features", "out_features"),
    [
        ([3, 0, 17, 40], 48, 80),
        ([0, 0, 1, 0, 0], 64, 64),
        ([90, 2, 1], 72, 72),
        ([0, 0, 0, 70], 16, 8),
        ([1] * 9, 8, 72),
    ],
)
def test_grouped_products_equal_float64(
    counts: list[int],
    in_features: int,
    out_features: int,
    dtype: torch.dtype,
    kernels: LayerKernels | None,
) -> None:
    """Experts with no row, one, and more than a tile; sizes no multiple of a tile; with bias and without."""
    x, weight = (
        random(n, in_features, dtype=dtype) for n in (sum(counts), len(counts) * out_features)
    )
    weight = weight.view(len(counts), out_features, in_features) / in_features**0.5
    bias = random(len(counts), out_features, seed=1, dtype=dtype)
    linear = make_linear(weight, kernels)
    tolerance = (
        1e-5 if dtype == torch.float32 else 5e-2
    )  # the interpreter rounds bfloat16 towards zero
    for b in (None, bias):
        wide = [
            rows.double() @ w.double().T for rows, w in zip(x.split(counts), weight, strict=True)
        ]
        if b is not None:
            wide = [product + row.double() for product, row in zip(wide, b, strict=True)]
        got = products(linear, x, b, counts)
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), torch.cat(wide), rtol=tolerance, atol=tolerance)


# Layers


def transformers_block(variant: str) -> nn.Module:
    """transformers' own layer, with wide random weights."""
    sizes = {"hidden_size": HIDDEN, "num_experts_per_tok": NUM_CHOSEN}
    if variant == "mixtral":
        config = MixtralConfig(**sizes, intermediate_size=COLUMNS, num_local_experts=NUM_EXPERTS)
        kind = MixtralSparseMoeBlock
    elif variant == "gpt_oss":
        config = GptOssConfig(**sizes, intermediate_size=COLUMNS, num_local_experts=NUM_EXPERTS)
        kind = GptOssMLP
    else:
        config = Qwen3MoeConfig(
            **sizes,
            moe_intermediate_size=COLUMNS,
            num_experts=NUM_EXPERTS,
            norm_topk_prob=VARIANTS[variant].normalised,
        )
        kind = Qwen3MoeSparseMoeBlock
    config._experts_implementation = "eager"
    block = kind(config)
    with torch.no_grad():
        for i, parameter in enumerate(block.parameters()):
            parameter.copy_(random(*parameter.shape, seed=i))
        (
            block.router if hasattr(block, "router") else block.gate
        ).weight *= 0.2  # no expert outweighs all
    return block


def expected_output(block: nn.Module, x: Tensor) -> Tensor:
    with torch.inference_mode():
        output = block(x.unsqueeze(0))
    return (output[0] if isinstance(output, tuple) else output).view_as(x)


def make(
    experts: Experts, block: nn.Module, folder: Path, kernels: LayerKernels | None
) -> SparseMLP:
    """Our layer with transformers' weights, through a file, as a checkpoint's tensors come."""
    mlp = SparseMLP(experts, HIDDEN, TensorParallel(), dtype=torch.float32, kernels=kernels)
    router = block.router if hasattr(block, "router") else block.gate
    tensors = {name: tensor.contiguous() for name, tensor in block.experts.state_dict().items()}
    save_file(tensors, folder / "experts.safetensors")
    with torch.no_grad(), open_tensors([folder / "experts.safetensors"]) as stored:
        for name, parameter in mlp.gate.named_parameters():
            parameter.copy_(getattr(router, name))
        for name in tensors:
            mlp.experts.load(name, stored[name], None)
    mlp.to(device_of(kernels))
    mlp.gate.finish_loading()
    mlp.experts.finish_loading()
    return mlp


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_layer_equals_transformers(
    variant: str, kernels: LayerKernels | None, tmp_path: Path
) -> None:
    """From one token, whose other experts have none, to more than a tile for each; outputs of 100s."""
    block = transformers_block(variant)
    mlp = make(VARIANTS[variant], block, tmp_path, kernels)
    for num_tokens in (1, 7, 60):
        x = random(num_tokens, HIDDEN, seed=num_tokens)
        output = mlp(x.to(device_of(kernels))).cpu()
        torch.testing.assert_close(output, expected_output(block, x), rtol=2e-5, atol=2e-3)
    assert mlp(x[:0]).shape == (0, HIDDEN)


@pytest.mark.parametrize("num_experts", [4, 12, 130])
def test_weights_are_a_softmax_in_float32(num_experts: int, kernels: LayerKernels | None) -> None:
    """Of the highest scores, highest first."""
    scores = (random(9, num_experts).argsort(-1).bfloat16() / 8).to(
        device_of(kernels)
    )  # no two alike
    probabilities = scores.double().softmax(-1)
    choose = choose_experts if kernels is None else kernels.experts.choose
    for normalised in (True, False):
        weights, chosen = choose(scores, 4, normalised=normalised)
        expected = probabilities.gather(1, chosen)
        assert torch.equal(chosen, scores.float().topk(4).indices)
        if normalised:
            expected = expected / expected.sum(-1, keepdim=True)
        assert weights.dtype == torch.float32
        torch.testing.assert_close(weights.double(), expected, rtol=1e-5, atol=1e-7)


def test_many_choices_are_grouped_as_torch_sorts_them() -> None:
    """More than a program looks at together, of few experts and of many, some of which nobody chose."""
    pytest.importorskip("triton", reason="triton is not installed, so its kernels cannot run")
    from engine.kernels.products.expert_groups import TILE, group_by_expert

    for num_tokens, num_chosen, num_experts in ((TILE, 2, 3), (1, 1, 1), (TILE // 4 + 1, 8, 150)):
        generator = torch.Generator().manual_seed(num_tokens)
        chosen = (
            torch.rand(num_tokens, num_experts, generator=generator)
            .topk(num_chosen)
            .indices.to(DEVICE)
        )
        chosen[chosen == num_experts - 2] = 0
        sorted_by_torch = ExpertGroups.of(chosen, num_experts)
        fused = ExpertGroups(*group_by_expert(chosen, num_experts))
        for name in ("tokens", "places", "ends"):
            assert torch.equal(getattr(fused, name), getattr(sorted_by_torch, name)), name


def test_a_row_of_padding_gets_experts_that_are_there() -> None:
    """Whatever its scores are: a choice outside would be read outside of the weights."""
    pytest.importorskip("triton", reason="triton is not installed, so its kernels cannot run")
    from engine.kernels.products.expert_groups import choose_experts as choose

    for value in (torch.nan, torch.inf, -torch.inf):
        scores = random(3, 5).to(DEVICE)
        scores[1] = value
        scores[2, 1:3] = value
        for normalised in (True, False):
            weights, chosen = choose(scores, 3, normalised=normalised)
            assert ((chosen >= 0) & (chosen < 5)).all()
            expected = choose_experts(scores[:1], 3, normalised=normalised)
            torch.testing.assert_close((weights[:1], chosen[:1]), expected)
