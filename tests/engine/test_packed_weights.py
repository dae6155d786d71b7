"""Weights that stay in 4 or 8 bits: the products, the memory that they take, and what is unpacked after all."""

import json
import logging
import re
from math import prod
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine import Engine, EngineConfig, SamplingParams
from engine.attention.base import KernelBackend
from engine.attention.cpu_backend import CpuBackend
from engine.attention.layer_kernels import PackedKernels
from engine.checkpoint.packed_form import PackedForm, PackedPart
from engine.kernels.products.codes import BITS, NUMBERS
from engine.layers.linear import ReplicatedLinear
from engine.layers.packed import PackedProduct
from engine.layers.parallel import TensorParallel
from engine.models.base import ModelPlace
from engine.models.load import count_weight_bytes, read_supported
from engine.run import check_machine
from engine.run.check_up import check_up, loaded_bytes
from tests.engine.paged import DEVICE
from tests.engine.quantizers import FORMATS, QuantizedCheckpoint, quantize_checkpoint

CPU = torch.device("cpu")
#: Of a product: rounding of the result. Triton's interpreter rounds bfloat16 towards zero.
CLOSE = {torch.bfloat16: 2**-7, torch.float32: 1e-6}
GIB = 2**30


def backend_of(way: str) -> KernelBackend:
    if way == "cpu":
        return CpuBackend(CPU)
    pytest.importorskip("triton", reason="triton is not installed, so its kernels cannot run")
    from engine.attention.triton_backend import TritonBackend

    return TritonBackend(CPU)


def packed_kernels(way: str = "cpu") -> PackedKernels:
    layer_kernels = backend_of(way).layer_kernels
    assert layer_kernels is not None
    found = layer_kernels.packed
    assert found is not None
    if found.block("int4", 64) is None:
        pytest.skip("this processor has no vectors of 64 bytes: weights are unpacked")
    return found


#: The kinds that bitsandbytes writes, with scales in float32.
OF_BITSANDBYTES = ("nf4", "bnb_fp4")


def make_product(
    kind: str,
    out_features: int,
    in_features: int,
    group: int | None,
    way: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> tuple[PackedProduct, Tensor]:
    """A product with random codes, and its weight in float64. dtype: in which numbers of tables are rounded."""
    kernels = packed_kernels(way)
    size = group or in_features
    generator = torch.Generator().manual_seed(out_features)

    def draw(most: int, *shape: int) -> Tensor:
        return torch.randint(0, most, shape, generator=generator).to(torch.uint8)

    num_codes = 1 << BITS[kind]
    codes = draw(num_codes, out_features, in_features)
    zeros = None
    if kind == "fp8":
        codes[(codes & 127) == 127] = 1  # no NaN
        values = codes.view(torch.float8_e4m3fn).double()
    elif kind in NUMBERS:
        values = torch.tensor(NUMBERS[kind], dtype=dtype).double()[codes.int()]
    else:
        zeros = draw(num_codes, out_features, in_features // size)
        values = codes.double() - zeros.double().repeat_interleave(size, 1)
    scale_dtype = torch.float32 if kind in OF_BITSANDBYTES else torch.float16
    scales = torch.rand(out_features, in_features // size, generator=generator).to(scale_dtype)
    if kind == "fp4":
        scales = 2 ** torch.floor(8 * scales - 8)  # as MXFP4 has them
    weight = values * scales.double().repeat_interleave(size, 1)
    block = kernels.block(kind, size)
    assert block is not None
    product = PackedProduct(
        PackedForm(kind, group, scale_dtype), in_features, out_features, kernels, block
    )
    cut = out_features // 3  # filled from two tensors, as queries and keys are
    for rows in (slice(0, cut), slice(cut, out_features)):
        part = PackedPart(codes[rows], scales[rows], None if zeros is None else zeros[rows])
        product.fill(rows.start, part)
    product.finish_loading()
    return product.to(DEVICE if way == "triton" else CPU), weight


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize(
    ("way", "kind", "out_features", "in_features", "group"),
    [
        ("cpu", "int4", 70, 256, 32),
        ("cpu", "int4", 64, 384, None),
        ("cpu", "int8", 130, 96, 48),
        ("cpu", "fp8", 30, 128, None),
        ("cpu", "fp4", 70, 96, 32),
        ("cpu", "nf4", 70, 192, 64),
        ("cpu", "bnb_fp4", 40, 96, 16),
        ("triton", "int4", 70, 128, 32),
        ("triton", "int8", 30, 192, 96),
        ("triton", "fp8", 30, 64, None),
        ("triton", "fp4", 40, 64, 32),
        ("triton", "fp4", 70, 96, 32),
        ("triton", "nf4", 70, 128, 64),
        ("triton", "bnb_fp4", 40, 96, 32),
    ],
)
def test_a_product_is_that_of_the_unpacked_weight(
    way: str, kind: str, out_features: int, in_features: int, group: int | None, dtype: torch.dtype
) -> None:
    """For rows that meet codes, rows that meet an unpacked block, and a second task; with a bias, or none."""
    product, weight = make_product(kind, out_features, in_features, group, way, dtype)
    x = torch.randn(200, in_features + 8, generator=torch.Generator().manual_seed(1)).to(dtype)
    x = x[:, 8:]  # rows with gaps between them
    bias = torch.randn(out_features).to(dtype)
    device = product.words.device
    for rows in (0, 1, 2, 3, 4, 5, 6, 7, 12, 29, 200) if way == "cpu" else (0, 1, 70):
        for added in (None, bias):
            moved = None if added is None else added.to(device)
            found = product(x[:rows].to(device), moved).cpu()
            assert found.dtype == dtype
            expected = x[:rows].double() @ weight.t()
            terms = x[:rows].double().abs() @ weight.abs().t()
            if added is not None:
                expected += added.double()
                terms += added.double().abs()
            allowed = CLOSE[dtype] * expected.abs() + 1e-5 * terms
            assert ((found.double() - expected).abs() <= allowed).all(), rows


@pytest.mark.parametrize(("kind", "group"), [("int4", 32), ("nf4", 64), ("bnb_fp4", 64)])
def test_a_product_takes_the_memory_of_its_codes_and_scales(kind: str, group: int) -> None:
    """Of bfloat16's: at most 0.35, with a scale and a zero point for 32 columns, or a wide scale for 64."""
    product, weight = make_product(kind, 256, 512, group)
    taken = sum(each.nbytes for each in product.parameters())
    assert taken <= 0.35 * 2 * weight.numel()


@pytest.fixture(scope="module", params=["awq", "bnb_nf4_nested", "bnb_fp4", "bnb_int8"])
def quantized(
    request: pytest.FixtureRequest,
    folders: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> QuantizedCheckpoint:
    target = tmp_path_factory.mktemp(request.param)
    return quantize_checkpoint(folders["gqa1_untied"], target, FORMATS[request.param])


def config(folder: Path, **changes: object) -> EngineConfig:
    values = {"dtype": "float32", "kv_cache_bytes": 1 << 22, "max_model_len": 128, **changes}
    return EngineConfig(str(folder), **values)  # type: ignore[arg-type]


def packed_layers(engine: Engine) -> set[bool]:
    model = engine._open_runner().model
    linears = [each for each in model.modules() if isinstance(each, ReplicatedLinear)]
    return {isinstance(each.instead, PackedProduct) for each in linears}


def test_every_linear_layer_keeps_its_weight_packed(quantized: QuantizedCheckpoint) -> None:
    packed_kernels()
    with Engine(config(quantized.folder)) as engine:
        assert packed_layers(engine) == {True}
        names = dict(engine._open_runner().model.named_parameters())
    assert not any(name.endswith("_proj.weight") for name in names)


@pytest.mark.parametrize("changes", [{"attention_backend": "torch"}, {"deterministic": True}])
def test_weights_are_unpacked_where_nothing_multiplies_with_packed_ones(
    quantized: QuantizedCheckpoint, caplog: pytest.LogCaptureFixture, changes: dict[str, object]
) -> None:
    with (
        caplog.at_level(logging.INFO, "engine"),
        Engine(config(quantized.folder, **changes)) as engine,
    ):
        assert packed_layers(engine) == {False}
    assert "8 layers are unpacked when they are read" in caplog.text


def test_a_layer_of_which_a_part_is_quantized_is_unpacked(
    folders: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    packed_kernels()
    names = ("q_proj", "v_proj", "up_proj", "o_proj")
    made = quantize_checkpoint(folders["gqa1_untied"], tmp_path, FORMATS["awq"], names)
    greedy = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    tokens = []
    for folder in (made.folder, made.unpacked):
        with caplog.at_level(logging.INFO, "engine"), Engine(config(folder)) as engine:
            (completion,) = engine.generate([[5, 9, 300]], greedy)
            tokens.append(completion.token_ids)
    assert tokens[0] == tokens[1]
    assert "2 layers stay packed" in caplog.text
    assert "model.layers.0.self_attn.qkv_proj" in caplog.text


@pytest.mark.parametrize("changes", [{}, {"attention_backend": "torch"}])
def test_doctor_counts_weights_as_a_start_takes_them(
    quantized: QuantizedCheckpoint, changes: dict[str, object]
) -> None:
    """Packed ones, and those that are unpacked."""
    asked = config(quantized.folder, **changes)
    model, path = read_supported(quantized.folder, "native")
    assert path.decoder is not None
    counted = loaded_bytes(asked, model, path.decoder, quantized.folder, "float32")
    with Engine(asked) as engine:
        parameters = list(engine._open_runner().model.parameters())
    taken = sum(
        each.numel() * each.element_size() if each.is_mkldnn else each.nbytes for each in parameters
    )
    assert counted == taken
    (found,) = [each for each in check_up(asked) if each.subject == "memory"]
    assert f"weights {counted / 2**30:.2f} GiB" in found.text


def write_llama_70b(folder: Path) -> None:
    """Llama-3-70B's shapes in AWQ: files that are one hole behind their header."""
    hidden, inner, kv, layers, vocab, group = 8192, 28_672, 1024, 80, 128_256, 128
    config_values = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden,
        "intermediate_size": inner, "num_attention_heads": 64, "num_key_value_heads": 8,
        "num_hidden_layers": layers, "vocab_size": vocab, "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5, "rope_theta": 5e5, "hidden_act": "silu", "torch_dtype": "bfloat16",
        "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1,
        "quantization_config": FORMATS["awq"].config | {"group_size": group},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config_values))
    sizes = {
        "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden), "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    tensors: dict[str, tuple[str, list[int]]] = {
        "model.embed_tokens.weight": ("BF16", [vocab, hidden]),
        "lm_head.weight": ("BF16", [vocab, hidden]),
        "model.norm.weight": ("BF16", [hidden]),
    }
    for layer in range(layers):
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{name}.weight"] = ("BF16", [hidden])
        for name, (rows, columns) in sizes.items():
            module = f"model.layers.{layer}.{name}"
            tensors[f"{module}.qweight"] = ("I32", [columns, rows // 8])
            tensors[f"{module}.qzeros"] = ("I32", [columns // group, rows // 8])
            tensors[f"{module}.scales"] = ("F16", [columns // group, rows])
    places = {}
    for part in range(
        0, len(tensors), 200
    ):  # one file would be more than a process may map at once
        names = list(tensors)[part : part + 200]
        places |= dict.fromkeys(names, f"model-{part}.safetensors")
        write_hole(folder / f"model-{part}.safetensors", {name: tensors[name] for name in names})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def write_hole(path: Path, tensors: dict[str, tuple[str, list[int]]]) -> None:
    """A safetensors file of tensors by dtype and shape, without their contents."""
    header: dict[str, object] = {}
    end = 0
    for name, (dtype, shape) in tensors.items():
        start = end
        end += prod(shape) * (4 if dtype == "I32" else 2)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    content = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(content).to_bytes(8, "little") + content)
        file.truncate(8 + len(content) + end)


@pytest.mark.parametrize("way", ["cpu", "triton"])
def test_a_70b_model_in_int4_fits_a_gpu_of_80_gb(tmp_path: Path, way: str) -> None:
    """By shapes: no weight is read. In bfloat16 it takes 140 GB."""
    packed_kernels(way)
    write_llama_70b(tmp_path)
    model, path = read_supported(tmp_path, "native")
    assert path.decoder is not None
    place = ModelPlace(TensorParallel(), backend_of(way), CPU, torch.bfloat16, 8192)
    counted = count_weight_bytes(model, tmp_path, path.decoder, place)
    assert 37 * GIB < counted < 40 * GIB


def test_doctor_finds_room_for_a_70b_model_in_int4_on_80_gb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory alone stands in. What the weights leave is the pool, and the longest sequence fits into it."""
    packed_kernels()
    write_llama_70b(tmp_path)
    free_bytes = int(0.9 * 80e9)
    owner = "free of the GPU within memory_utilization"
    monkeypatch.setattr(check_machine, "free_memory", lambda config: (free_bytes, owner))
    (found,) = [
        each
        for each in check_up(EngineConfig(str(tmp_path), dtype="bfloat16"))
        if each.subject == "memory"
    ]
    assert found.grade == "ok"
    sizes = re.findall(r"(?:weights|pool of) ([\d.]+) GiB", found.text)
    weights, pool = map(float, sizes)
    assert 37 < weights < 40
    assert weights + pool == pytest.approx(free_bytes / GIB, abs=0.02)
    assert "sequences of up to 8192" in found.text
