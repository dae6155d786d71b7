"""Experts whose weights stay in 4 or 8 bits: their products, their share on each rank, and the memory they take."""

import weakref
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from engine import Engine, EngineConfig, SamplingParams
from engine.checkpoint.packed_form import PackedForm, PackedPart
from engine.kernels.products.codes import BITS, NUMBERS
from engine.layers.grouped_linear import ExpertGroups, GroupedLinear, PackedGroupedLinear
from engine.layers.moe import ExpertMLPs
from engine.layers.packed import PackedLayout
from engine.models.load import read_supported
from engine.run.check_up import loaded_bytes
from engine.run.forward.warm_up import warm_up_steps
from tests.engine.families import BY_NAME, make_family
from tests.engine.paged import DEVICE
from tests.engine.quantizers import (
    FORMATS,
    FP8_BLOCKS,
    Format,
    QuantizedCheckpoint,
    fp8,
    quantize_checkpoint,
    quantize_experts,
)
from tests.engine.test_packed_weights import CLOSE, CPU, packed_kernels

EXPERTS = 5
PROMPTS = [[5, 9, 300, 41, 8], [7], list(range(20, 50))]
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
}
LINEAR = ("_proj", ".w1", ".w2", ".w3")
#: As Qwen3-30B-A3B-FP8 is quantized. A rank's rows and columns begin within a block.
BLOCKS = Format(
    FP8_BLOCKS | {"weight_block_size": [24, 64]},
    lambda weight: fp8(weight, (24, 64), "weight_scale_inv", "matrix"),
)
#: A family, how its experts are quantized, and the kind in which they stay.
CHECKPOINTS = [
    ("mixtral", "awq", "int4"),
    ("mixtral", "ct_fp8_channel", "fp8"),
    ("qwen3_moe", "fp8_blocks_of_24x64", "fp8"),
    ("gpt_oss", "mxfp4", "fp4"),
    ("mixtral", "bnb_nf4_blocks_of_32", "nf4"),
]


def make_layer(
    kind: str,
    out_features: int,
    in_features: int,
    group: int,
    way: str,
    dtype: torch.dtype = torch.float32,
) -> tuple[PackedGroupedLinear, Tensor]:
    """A layer of random experts, and their weights [experts, out, in] in float64.

    dtype: in which numbers of tables are rounded.
    """
    kernels = packed_kernels(way)
    generator = torch.Generator().manual_seed(out_features)
    shape = (EXPERTS, out_features, in_features)
    codes = torch.randint(0, 1 << BITS[kind], shape, generator=generator).to(torch.uint8)
    scales = torch.rand(EXPERTS, out_features, in_features // group, generator=generator).half()
    zeros = None
    if kind in NUMBERS:
        scales = 2 ** torch.floor(8 * scales - 8) if kind == "fp4" else scales
        values = torch.tensor(NUMBERS[kind], dtype=dtype).double()[codes.int()]
    else:
        zeros = torch.randint(0, 1 << BITS[kind], scales.shape, generator=generator)
        zeros = zeros.to(torch.uint8)
        values = codes.double() - zeros.double().repeat_interleave(group, 2)
    weights = values * scales.double().repeat_interleave(group, 2)
    block = kernels.block(kind, group)
    assert block is not None
    layout = PackedLayout(PackedForm(kind, group, torch.float16), block)
    layer = PackedGroupedLinear(layout, EXPERTS, in_features, out_features, kernels)
    cut = out_features // 2  # filled from two tensors, as gates and ups are
    for expert in range(EXPERTS):
        for rows in (slice(0, cut), slice(cut, out_features)):
            part_zeros = None if zeros is None else zeros[expert, rows]
            part = PackedPart(codes[expert, rows], scales[expert, rows], part_zeros)
            layer.fill(expert, rows.start, part)
    layer.finish_loading()
    return layer.to(DEVICE if way == "triton" else CPU), weights


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize(
    ("way", "kind", "out_features", "in_features", "group"),
    [
        ("cpu", "int4", 70, 64, 32),
        ("cpu", "int8", 64, 96, 48),
        ("cpu", "fp4", 72, 96, 32),
        ("cpu", "nf4", 72, 128, 64),
        ("triton", "int4", 70, 64, 32),
        ("triton", "int8", 32, 64, 64),
        ("triton", "fp4", 40, 96, 32),
        ("triton", "fp4", 40, 128, 32),
        ("triton", "nf4", 40, 128, 64),
    ],
)
def test_each_row_meets_the_weight_of_its_expert(
    way: str, kind: str, out_features: int, in_features: int, group: int, dtype: torch.dtype
) -> None:
    """With experts that have no row, one, and more than a tile; with a bias, or none."""
    layer, weights = make_layer(kind, out_features, in_features, group, way, dtype)
    generator = torch.Generator().manual_seed(1)
    bias = torch.randn(EXPERTS, out_features, generator=generator).to(dtype)
    for counts in ([0, 1, 0, 70, 3], [2, 0, 0, 0, 0], [0] * EXPERTS):
        experts = torch.repeat_interleave(torch.arange(EXPERTS), torch.tensor(counts))
        groups = ExpertGroups.of(experts[:, None].to(layer.words.device), EXPERTS)
        x = torch.randn(len(experts), in_features, generator=generator).to(dtype)
        for added in (None, bias):
            moved = None if added is None else added.to(layer.words.device)
            found = layer(x.to(layer.words.device), moved, groups).cpu()
            assert found.dtype == dtype
            terms = x.double()[:, None] * weights[experts]
            expected, total = terms.sum(2), terms.abs().sum(2)
            if added is not None:
                expected += added.double()[experts]
                total += added.double()[experts].abs()
            allowed = CLOSE[dtype] * expected.abs() + 1e-5 * total
            assert ((found.double() - expected).abs() <= allowed).all(), counts


def test_experts_are_laid_out_one_at_a_time() -> None:
    """The copies of all experts together would double, at the start, what a layer takes."""
    kernels = packed_kernels()
    layout = PackedLayout(PackedForm("int4", 32, torch.float16), 32)
    copies: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def lay_out(*parts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        alive.append(sum(copy() is not None for copy in copies))
        laid_out = kernels.lay_out(*parts)
        copies.append(weakref.ref(laid_out[0]))
        return laid_out

    layer = PackedGroupedLinear(layout, EXPERTS, 64, 64, replace(kernels, lay_out=lay_out))
    layer.finish_loading()
    assert len(alive) == EXPERTS
    assert max(alive) <= 1


@pytest.mark.parametrize(
    ("num_chosen", "num_experts"), [(2, 8), (4, 32), (4, 128), (8, 128), (10, 512)]
)
def test_a_start_compiles_every_tile_of_packed_experts(num_chosen: int, num_experts: int) -> None:
    """Otherwise the first step of such a size waits for the compiler while the engine serves."""
    pytest.importorskip("triton", reason="triton is not installed, so its kernels cannot run")
    from engine.kernels.products.packed_product import choose_tile

    asked = EngineConfig("any", max_num_seqs=256, max_num_batched_tokens=8192)
    steps = warm_up_steps(asked, max_model_len=4096, num_blocks=512)

    def tiles(numbers_of_tokens: Iterable[int]) -> set[tuple[int, ...]]:
        rows = (-(-number * num_chosen // num_experts) for number in numbers_of_tokens)
        return {choose_tile(each, block=32, itemsize=2) for each in rows}

    assert tiles(len(step.token_ids) for step in steps) == tiles(range(1, 8193))


def test_experts_in_mxfp4_take_a_third_of_the_memory_of_bfloat16() -> None:
    layer, weights = make_layer("fp4", 256, 512, 32, "cpu")
    taken = sum(each.nbytes for each in layer.parameters())
    assert taken <= 0.3 * 2 * weights.numel()


@pytest.fixture(scope="module", params=CHECKPOINTS, ids=lambda param: "-".join(param[:2]))
def quantized(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[QuantizedCheckpoint, str]:
    """A checkpoint with quantized experts, and their kind."""
    name, form, kind = request.param
    target = tmp_path_factory.mktemp(name)
    family = BY_NAME[name]
    original = make_family(target / "original", replace(family, values=family.values | SIZES))
    if form == "mxfp4":
        return quantize_experts(original, target), kind
    return quantize_checkpoint(original, target, FORMATS.get(form, BLOCKS), LINEAR), kind


def experts_of(engine: Engine) -> list[nn.Module]:
    """The products of all layers' experts, gates and ups before downs."""
    modules = engine._open_runner().model.modules()
    layers = [each for each in modules if isinstance(each, ExpertMLPs)]
    return [product for layer in layers for product in (layer.gate_up, layer.down)]


def config(folder: Path, **changes: object) -> EngineConfig:
    values = {"dtype": "float32", "kv_cache_bytes": 1 << 22, "max_model_len": 128, **changes}
    return EngineConfig(str(folder), **values)  # type: ignore[arg-type]


def answers(folder: Path, **changes: object) -> list[list[int]]:
    with Engine(config(folder, **changes)) as engine:
        return [each.token_ids for each in engine.generate(PROMPTS, GREEDY)]


@pytest.mark.parametrize("backend", ["cpu", "triton"])
def test_experts_stay_packed_and_answer_as_their_unpacked_weights(
    quantized: tuple[QuantizedCheckpoint, str], backend: str
) -> None:
    packed_kernels()
    made, kind = quantized
    if backend == "triton" and kind == "int4":
        pytest.skip("groups of 16 columns are unpacked on a GPU")
    with Engine(config(made.folder, attention_backend=backend)) as engine:
        products = experts_of(engine)
        forms = [each.layout.form for each in products if isinstance(each, PackedGroupedLinear)]
        assert [form.kind for form in forms] == [kind] * 4
        found = [each.token_ids for each in engine.generate(PROMPTS, GREEDY)]
    assert found == answers(made.unpacked)


def test_experts_of_which_one_is_plain_are_unpacked_and_the_others_stay_packed(
    tmp_path: Path,
) -> None:
    """A grouped product has one form for all experts: the first expert's `down` is left plain."""
    packed_kernels()
    family = BY_NAME["mixtral"]
    original = make_family(tmp_path / "original", replace(family, values=family.values | SIZES))
    quantized_ones = (".w1", ".w3", *(f".{expert}.w2" for expert in range(1, EXPERTS)))
    made = quantize_checkpoint(original, tmp_path, FORMATS["awq"], quantized_ones)
    with Engine(config(made.folder)) as engine:
        kinds = [type(each) for each in experts_of(engine)]
        found = [each.token_ids for each in engine.generate(PROMPTS, GREEDY)]
    assert kinds == [PackedGroupedLinear, GroupedLinear] * 2
    assert found == answers(made.unpacked)


@pytest.mark.usefixtures("forked_ranks")
def test_two_ranks_hold_their_share_of_packed_experts(
    quantized: tuple[QuantizedCheckpoint, str],
) -> None:
    made, _ = quantized
    assert answers(made.folder, tensor_parallel_size=2) == answers(made.folder)


def test_doctor_counts_packed_experts_as_a_start_takes_them(
    quantized: tuple[QuantizedCheckpoint, str],
) -> None:
    made, _ = quantized
    asked = config(made.folder)
    model, path = read_supported(made.folder, "native")
    assert path.decoder is not None
    counted = loaded_bytes(asked, model, path.decoder, made.folder, "float32")
    with Engine(asked) as engine:
        parameters = list(engine._open_runner().model.parameters())
    taken = sum(
        each.numel() * each.element_size() if each.is_mkldnn else each.nbytes for each in parameters
    )
    assert counted == taken
