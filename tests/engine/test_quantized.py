"""Quantized checkpoints: what is unpacked is what each format means, and what is damaged is named."""

import json
import logging
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine import (
    ConfigError,
    DamagedWeights,
    Engine,
    EngineConfig,
    EngineError,
    MissingWeights,
    SamplingParams,
    UnsupportedModel,
    WeightMismatch,
)
from engine.checkpoint import quantized
from engine.checkpoint.mxfp4 import Mxfp4Tensor
from engine.checkpoint.packed_form import PackedForm
from engine.checkpoint.quantization import Quantization, read_quantization
from engine.checkpoint.quantized import QuantizedTensor, unpacked
from engine.checkpoint.weights import CheckpointTensor, open_tensors
from engine.kernels.products.codes import NUMBERS
from tests.engine.families import BY_NAME, make_family
from tests.engine.quantizers import (
    FORMATS,
    QuantizedCheckpoint,
    bnb4,
    bnb4_config,
    mxfp4,
    quantize_checkpoint,
    quantize_experts,
)

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
PROMPTS = [[5, 9, 300, 7], [411], list(range(40, 90))]
#: Of the logits against those of the weights: what two layers of a random model make of an error.
AMPLIFIED = 4
#: Packed weights are multiplied in another order of sums than unpacked ones.
SUMMED_OTHERWISE: dict[str, float] = {"rtol": 1e-4, "atol": 1e-4}
MODULE = "model.layers.1.mlp.down_proj"


@pytest.fixture(scope="module")
def checkpoints(
    folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], QuantizedCheckpoint]:
    """A checkpoint in each format, made when it is first asked for."""
    made: dict[str, QuantizedCheckpoint] = {}

    def get(name: str) -> QuantizedCheckpoint:
        if name not in made:
            target = tmp_path_factory.mktemp(name)
            made[name] = quantize_checkpoint(folders["gqa1_untied"], target, FORMATS[name])
        return made[name]

    return get


def config(folder: Path, **changes: Any) -> EngineConfig:
    values: dict[str, Any] = {"dtype": "float32", "kv_cache_bytes": 1 << 22, "max_model_len": 128}
    return EngineConfig(str(folder), **{**values, **changes})


def answers(folder: Path, **changes: Any) -> tuple[Tensor, list[list[int]]]:
    """Logits [prompts, vocabulary] of the first new token, and the greedy tokens."""
    seen: list[Tensor] = []
    with Engine(config(folder, **changes)) as engine:
        model = engine._open_runner().model
        compute = model.logits

        def logits(hidden: Tensor) -> Tensor:
            seen.append(compute(hidden))
            return seen[-1]

        model.logits = logits
        completions = engine.generate(PROMPTS, GREEDY)
    return seen[0], [completion.token_ids for completion in completions]


@contextmanager
def weights_of(folder: Path) -> Iterator[dict[str, CheckpointTensor]]:
    quantization = read_quantization(json.loads((folder / "config.json").read_text()))
    with open_tensors(sorted(folder.glob("*.safetensors"))) as tensors:
        yield unpacked(tensors, quantization)


def relative(error: Tensor, of: Tensor) -> float:
    return float(error.norm() / of.norm())


KINDS = (
    "fp8_blocks",
    "ct_int8_channel",
    "ct_packed4",
    "awq",
    "gptq_act_order",
    "bnb_nf4_nested",
    "bnb_fp4",
    "bnb_int8",
)


@pytest.mark.parametrize(
    "name",
    [
        *KINDS,
        *(pytest.param(name, marks=pytest.mark.long) for name in FORMATS if name not in KINDS),
    ],
)
def test_a_quantized_checkpoint_answers_as_its_unpacked_weights(
    checkpoints: Callable[[str], QuantizedCheckpoint], name: str
) -> None:
    """But for the order of sums, and as far from the original's logits as rounding the weights explains."""
    made = checkpoints(name)
    logits, tokens = answers(made.folder)
    expected_logits, expected_tokens = answers(made.unpacked)
    torch.testing.assert_close(logits, expected_logits, **SUMMED_OTHERWISE)
    assert tokens == expected_tokens
    before, _ = answers(made.original)
    weights, original = (
        load_file(made.unpacked / "model.safetensors"),
        load_file(made.original / "model.safetensors"),
    )
    names = [each for each in original if each.endswith("_proj.weight")]
    rounding = max(relative(weights[each] - original[each], original[each]) for each in names)
    assert 0 < rounding < 0.2
    assert relative(logits - before, before) < AMPLIFIED * rounding


@pytest.mark.parametrize("name", FORMATS)
def test_any_part_of_a_weight_is_what_the_whole_has_there(
    checkpoints: Callable[[str], QuantizedCheckpoint], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Also one that begins and ends inside a word, a block or a group, and one unpacked in several pieces."""
    monkeypatch.setattr(quantized, "AT_ONCE", 1000)
    made = checkpoints(name)
    expected = load_file(made.unpacked / "model.safetensors")[f"{MODULE}.weight"]
    with weights_of(made.folder) as tensors:
        weight = tensors[f"{MODULE}.weight"]
        assert weight.shape == tuple(expected.shape) == (48, 96)
        assert torch.equal(weight.whole(), expected)
        for dim, start, length in [
            (0, 0, 24),
            (0, 24, 24),
            (0, 3, 17),
            (1, 48, 48),
            (1, 5, 1),
            (1, 30, 66),
            (1, 0, 0),
        ]:
            assert torch.equal(weight.read(dim, start, length), expected.narrow(dim, start, length))


@pytest.mark.parametrize("name", ["bnb_nf4_nested", "bnb_fp4", "bnb_int8"])
def test_in_bfloat16_packed_weights_of_bitsandbytes_are_as_near_as_unpacked_ones(
    checkpoints: Callable[[str], QuantizedCheckpoint], name: str
) -> None:
    """Of nf4 the numbers are rounded before they are scaled, and unpacked weights when they are scaled."""
    made = checkpoints(name)
    exact = answers(made.unpacked)[0]
    packed = relative(answers(made.folder, dtype="bfloat16")[0].float() - exact, exact)
    plain = relative(answers(made.unpacked, dtype="bfloat16")[0].float() - exact, exact)
    assert 0 < packed < 1.5 * plain


@pytest.mark.parametrize(("family", "name"), [("phi3", "awq"), ("mixtral", "ct_fp8_channel")])
def test_weights_of_other_families_may_be_quantized(family: str, name: str, tmp_path: Path) -> None:
    """Also where one tensor of the files is several layers, or one of a layer's many experts."""
    original = make_family(tmp_path / "original", BY_NAME[family])
    made = quantize_checkpoint(original, tmp_path, FORMATS[name], ("_proj", ".w1", ".w2", ".w3"))
    logits, expected = answers(made.folder)[0], answers(made.unpacked)[0]
    torch.testing.assert_close(logits, expected, **SUMMED_OTHERWISE)


def test_a_gpt_oss_in_mxfp4_answers_as_its_unpacked_weights(tmp_path: Path) -> None:
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 32,
        "num_local_experts": 3,
        "num_hidden_layers": 2,
    }
    family = replace(BY_NAME["gpt_oss"], values={**BY_NAME["gpt_oss"].values, **sizes})
    made = quantize_experts(make_family(tmp_path / "original", family), tmp_path)
    logits, tokens = answers(made.folder)
    expected_logits, expected_tokens = answers(made.unpacked)
    torch.testing.assert_close(logits, expected_logits, **SUMMED_OTHERWISE)
    assert tokens == expected_tokens
    before = answers(made.original)[0]
    assert 0 < relative(logits - before, before) < 0.5


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("name", ["gptq_act_order", "awq", "bnb_nf4_nested", "bnb_int8"])
def test_two_ranks_answer_as_one(
    checkpoints: Callable[[str], QuantizedCheckpoint], name: str
) -> None:
    """Each with its share of unpacked weights, or of packed ones."""
    made = checkpoints(name)
    with Engine(config(made.folder, tensor_parallel_size=2)) as engine:
        completions = engine.generate(PROMPTS, GREEDY)
    assert [completion.token_ids for completion in completions] == answers(made.folder)[1]


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_may_stay_packed_unless_its_columns_are_in_another_order(
    checkpoints: Callable[[str], QuantizedCheckpoint], name: str
) -> None:
    """GPTQ's files say each column's group, whether or not the columns are in another order."""
    with weights_of(checkpoints(name).folder) as weights:
        forms = [each.packed_form for each in weights.values() if isinstance(each, QuantizedTensor)]
    assert forms
    assert {form is not None for form in forms} == {name != "gptq_act_order"}


def test_a_head_may_be_quantized_and_layers_may_be_left_as_they_are(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """What is quantized is seen in the files, so that no list of modules has to be understood."""
    for linear in ("lm_head", "layers.1.self_attn.o_proj"):
        made = quantize_checkpoint(
            folders["gqa1_untied"], tmp_path / linear, FORMATS["awq"], linear
        )
        logits, expected = answers(made.folder)[0], answers(made.unpacked)[0]
        torch.testing.assert_close(logits, expected, **SUMMED_OTHERWISE)


def test_what_belongs_to_activations_and_to_the_cache_is_passed_over(
    checkpoints: Callable[[str], QuantizedCheckpoint],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """And a bias of zeros, which AutoGPTQ writes for layers without one."""
    made = checkpoints("ct_fp8_channel")
    more = {
        f"{MODULE}.input_scale": torch.tensor([0.5]),
        "model.layers.0.self_attn.k_scale": torch.tensor(0.02),
        "model.layers.0.self_attn.v_scale": torch.tensor(0.02),
        f"{MODULE}.bias": torch.zeros(48),
    }
    folder = changed(made.folder, tmp_path, **more)
    with caplog.at_level(logging.INFO, "engine"):
        assert answers(folder)[1] == answers(made.folder)[1]
    assert re.search(r"the quantized weights of 8 (linear )?layers", caplog.text)
    with pytest.raises(
        WeightMismatch, match=r"down_proj\.bias', for which this model has no place"
    ):
        Engine(config(changed(made.folder, tmp_path, **{f"{MODULE}.bias": torch.ones(48)})))


def changed(source: Path, tmp_path: Path, **changes: Tensor | None) -> Path:
    """A copy of a checkpoint with other tensors, or without those that are None."""
    folder = Path(shutil.copytree(source, tmp_path / "changed", dirs_exist_ok=True))
    tensors = {**load_file(source / "model.safetensors"), **changes}
    kept = {name: tensor.contiguous() for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors")
    return folder


def put(value: float) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        tensor.view(-1)[-1] = value
        return tensor

    return change


def state(tensor: Tensor, **changes: Any) -> Tensor:
    """The tensor in which bitsandbytes describes a weight, with other values."""
    values = json.loads(bytes(tensor.tolist())) | changes
    return as_bytes(json.dumps(values))


def as_bytes(text: str) -> Tensor:
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


NAN, INF = float("nan"), float("inf")
STATE = "weight.quant_state.bitsandbytes__nf4"
DAMAGES = [
    ("fp8_blocks", "weight_scale_inv", None, MissingWeights, "is quantized and"),
    ("fp8_blocks", "weight_scale_inv", put(NAN), DamagedWeights, "NaN or infinite"),
    ("fp8_blocks", "weight_scale_inv", lambda t: t[:, :1], WeightMismatch, r"\[2, 1\], \[2, 3\] expected"),
    ("fp8_blocks", "weight_scale_inv", lambda t: t.int(), WeightMismatch, "holds I32, F32 or BF16 or F16"),
    ("fp8_blocks", "weight", put(NAN), DamagedWeights, "NaN or infinite"),
    ("ct_fp8_channel", "weight_scale", put(INF), DamagedWeights, "NaN or infinite"),
    ("ct_int8_asymmetric", "weight_zero_point", None, MissingWeights, "is quantized and"),
    ("ct_fp8_channel", "weight_scale", put(1e38), DamagedWeights, "weight_scale' .* too large"),
    ("ct_packed4", "weight_shape", lambda t: -t, DamagedWeights, r"is \[-48, -96\], which does not fit words of"),
    ("ct_packed4", "weight_scale", None, MissingWeights, "is quantized and"),
    ("awq", "qzeros", lambda t: t.long(), WeightMismatch, "holds I64, I32 expected"),
    ("gptq_act_order", "g_idx", None, MissingWeights, "is quantized and"),
    ("gptq_act_order", "g_idx", put(6), DamagedWeights, "other groups than the 6"),
    ("bnb_nf4", "weight.absmax", None, MissingWeights, "is quantized and"),
    ("bnb_nf4", "weight.absmax", put(NAN), DamagedWeights, "NaN or infinite"),
    ("bnb_nf4", "weight.absmax", lambda t: t[:-1], WeightMismatch, r"shape \[71\], \[72\] expected"),
    ("bnb_nf4", "weight", lambda t: t[:-1], WeightMismatch, "has 2303 bytes, 2304 expected: its .* 48 x 96"),
    ("bnb_nf4", "weight", lambda t: t.int(), WeightMismatch, "holds I32, U8 or I8 or F16"),
    ("bnb_nf4", "weight.quant_map", put(0.5), DamagedWeights, "other numbers than those of nf4"),
    ("bnb_nf4", STATE, None, MissingWeights, "is quantized and"),
    ("bnb_nf4", STATE, lambda t: t[:-1], DamagedWeights, "describes no matrix in nf4"),
    ("bnb_nf4", STATE, lambda t: state(t, shape=[48, -96]), DamagedWeights, "no positive integers"),
    ("bnb_nf4", STATE, lambda t: state(t, blocksize=10**30), DamagedWeights, "no positive integers"),
    ("bnb_nf4", STATE, lambda t: state(t, quant_type="fp4"), DamagedWeights, "quant_type is 'fp4'"),
    ("bnb_nf4", STATE, lambda t: as_bytes("[" * 100_000), DamagedWeights, "RecursionError"),
    ("bnb_nf4_nested", STATE, lambda t: state(t, nested_offset=10**400), DamagedWeights, "OverflowError"),
    ("bnb_nf4_nested", "weight.absmax", lambda t: t.float(), WeightMismatch, "holds F32, U8 expected"),
    ("bnb_nf4_nested", "weight.nested_absmax", None, MissingWeights, "is quantized and"),
    ("bnb_int8", "SCB", None, MissingWeights, "is quantized and"),
    ("bnb_int8", "SCB", put(INF), DamagedWeights, "NaN or infinite"),
    ("bnb_int8", "weight_format", put(2), UnsupportedModel, "is 2, 0 expected"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "part", "damage", "kind", "message"), DAMAGES)
def test_a_damaged_tensor_is_named(
    checkpoints: Callable[[str], QuantizedCheckpoint],
    tmp_path: Path,
    name: str,
    part: str,
    damage: Callable[[Tensor], Tensor] | None,
    kind: type[EngineError],
    message: str,
) -> None:
    made = checkpoints(name)
    tensor = load_file(made.folder / "model.safetensors")[f"{MODULE}.{part}"]
    folder = changed(
        made.folder, tmp_path, **{f"{MODULE}.{part}": None if damage is None else damage(tensor)}
    )
    with pytest.raises(kind, match=message) as raised:
        Engine(config(folder))
    assert f"'{MODULE}.{part}'" in str(raised.value)


@pytest.mark.parametrize(
    ("shape", "block", "group", "num_groups"),
    [
        ((4, 128), 64, 64, 2),
        ((4, 64), 64, None, 1),
        ((6, 32), 64, None, 1),  # two rows share a scale
        ((6, 96), 64, 32, 3),  # every third block goes over the end of a row
        ((3, 7), 64, 1, 7),  # with half a byte that is not used
        ((3, 10), 4, 2, 5),
    ],
)
def test_columns_of_bitsandbytes_share_a_scale_as_far_as_they_are_always_in_one_block(
    tmp_path: Path, shape: tuple[int, int], block: int, group: int | None, num_groups: int
) -> None:
    weight = torch.randn(*shape, generator=torch.Generator().manual_seed(1))
    made = bnb4(weight, "nf4", block=block)
    file = tmp_path / "model.safetensors"
    save_file({f"layer.{part}": tensor for part, tensor in made.parts.items()}, file)
    quantization = read_quantization({"quantization_config": bnb4_config("nf4")})
    with open_tensors([file]) as tensors:
        (found,) = unpacked(tensors, quantization).values()
        assert isinstance(found, QuantizedTensor)
        assert found.packed_form == PackedForm("nf4", group, torch.float32)
        assert torch.equal(found.whole(), made.weight)
        part = found.packed_part(slice(1, shape[0]), slice(0, shape[1]), group)
    numbers = torch.tensor(NUMBERS["nf4"])[part.codes.int()]
    assert part.scales.shape == (shape[0] - 1, num_groups)
    spread = part.scales.repeat_interleave(shape[1] // num_groups, 1)
    assert torch.equal(numbers * spread, made.weight[1:])


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
            assert torch.equal(
                found.read(dim, start, length).float(), made.weight.narrow(dim, start, length)
            )
        some = slice(1, 2), slice(5, 44), slice(2, 6)
        assert torch.equal(found.part(*some).float(), made.weight[some])
        assert isinstance(found, Mxfp4Tensor)
        packed = found.packed_part(1, slice(2, 6), slice(16, 48), group=16)
    scales = packed.scales.float().repeat_interleave(16, 1)
    numbers = torch.tensor(NUMBERS["fp4"])[packed.codes.int()]
    assert torch.equal(numbers * scales, made.weight[1, 16:48, 2:6].t())
    made.parts["scales"][1, 2, 0] = 255
    save_file({f"{name}_{part}": tensor for part, tensor in made.parts.items()}, file)
    with open_tensors([file]) as tensors, pytest.raises(DamagedWeights, match=f"'{name}_scales'"):
        unpacked(tensors, quantization)[name].whole()
    save_file({f"{name}_blocks": made.parts["blocks"]}, file)
    with open_tensors([file]) as tensors, pytest.raises(MissingWeights, match=f"'{name}_scales'"):
        unpacked(tensors, quantization)


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128}


def ct(form: str = "pack-quantized", **weights: Any) -> dict[str, Any]:
    values = {
        "num_bits": 4,
        "type": "int",
        "strategy": "group",
        "group_size": 32,
        "symmetric": True,
        **weights,
    }
    group = {"targets": ["Linear"], "weights": values}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
    }


def test_a_section_of_bitsandbytes_need_not_name_its_method() -> None:
    """transformers has written the method only since 4.32, and still reads what it wrote before."""
    section = {"load_in_4bit": False, "load_in_8bit": True, "llm_int8_threshold": 6.0}
    with_method = {"quant_method": "bitsandbytes", **section}
    found = read_quantization({"quantization_config": section})
    assert found is not None
    assert found == read_quantization({"quantization_config": with_method})


@pytest.mark.parametrize(
    ("quantization_config", "message"),
    [
        ({"quant_method": "hqq"}, "'hqq' are not supported; .* bitsandbytes"),
        (bnb4_config("af4"), "bnb_4bit_quant_type 'af4' is not supported; supported: 'nf4', 'fp4'"),
        ({"quant_method": "bitsandbytes"}, "load_in_4bit None, load_in_8bit None; one of them"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt 'e5m2'"),
        (GPTQ | {"bits": 3}, "bits 3 is not supported; supported: 4, 8"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        (AWQ | {"bits": 8}, "bits 8 is not supported; supported: 4"),
        (ct("marlin-24"), "'marlin-24'"),
        (ct(num_bits=3), "int3 weights in format 'pack-quantized'"),
        (ct() | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        (
            ct() | {"transform_config": {"config_groups": {"R1": {"type": "hadamard"}}}},
            "transform_config",
        ),
    ],
)
def test_what_is_not_built_is_refused_by_name(
    quantization_config: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        read_quantization({"quantization_config": quantization_config})


@pytest.mark.parametrize(
    "quantization_config",
    [
        [1],
        GPTQ | {"group_size": "many"},
        {"quant_method": "compressed-tensors"},
        ct() | {"config_groups": {"group_0": {"targets": ["re:("], "weights": {"num_bits": 4}}}},
    ],
)
def test_values_of_a_wrong_kind_are_named(quantization_config: Any) -> None:
    with pytest.raises(ConfigError, match="quantization_config"):
        read_quantization({"quantization_config": quantization_config})


def test_groups_of_modules_are_found_by_name_before_pattern_before_class() -> None:
    groups = {
        "a": {"targets": ["Linear"], "weights": ct()["config_groups"]["group_0"]["weights"]},
        "b": {
            "targets": ["re:.*down_proj$"],
            "weights": ct(group_size=64)["config_groups"]["group_0"]["weights"],
        },
        "c": {
            "targets": ["lm_head"],
            "weights": ct(group_size=8)["config_groups"]["group_0"]["weights"],
        },
    }
    quantization = read_quantization({"quantization_config": ct() | {"config_groups": groups}})
    assert isinstance(quantization, Quantization)
    sizes = {}
    for module in ("lm_head", MODULE, "model.layers.0.self_attn.q_proj"):
        scheme = quantization.scheme_of(module)
        assert scheme is not None
        sizes[module.rpartition(".")[2]] = scheme.block[1]
    assert sizes == {"lm_head": 8, "down_proj": 64, "q_proj": 32}
    only = read_quantization({"quantization_config": ct() | {"config_groups": {"c": groups["c"]}}})
    assert only is not None
    assert only.scheme_of(MODULE) is None
