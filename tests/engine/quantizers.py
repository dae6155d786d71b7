"""Quantizers of the formats that are read, as each is defined; they share no line with engine/checkpoint."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

GROUP = 16
BLOCK = (32, 40)
#: Column j of eight stands in nibble AWQ_NIBBLE[j] of its word.
AWQ_NIBBLE = (0, 4, 1, 5, 2, 6, 3, 7)
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
#: bitsandbytes' numbers in the order of their codes, up to a factor.
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip
FP4 = (0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0, 0, -0.0625, -8.0, -12.0, -4.0, -6.0, -2.0, -3.0)
BNB_TYPES = {"nf4": NF4, "fp4": FP4}
BNB_BLOCK = 64
NESTED_BLOCK = (
    16  # bitsandbytes has 256; so the small weights here have several, the last of them short
)


@dataclass(frozen=True)
class Quantized:
    """One weight: the tensors a file holds in its place, what they stand for, and the largest error."""

    parts: dict[str, Tensor]
    weight: Tensor
    largest_error: Tensor


@dataclass(frozen=True)
class Format:
    """A way to quantize, with what config.json says of it."""

    config: dict[str, Any]
    quantize: Callable[[Tensor], Quantized]


def fp8(weight: Tensor, block: tuple[int | None, int | None], name: str, shape: str) -> Quantized:
    """float8_e4m3fn with a scale for each block."""
    rows, columns = (size or total for size, total in zip(block, weight.shape, strict=True))
    largest = torch.nn.functional.max_pool2d(weight.abs()[None], (rows, columns), ceil_mode=True)[0]
    scale = largest / 448
    if shape == "exponents":
        scale = 2.0 ** scale.log2().ceil()
    spread = scale.repeat_interleave(rows, 0)[: len(weight)].repeat_interleave(columns, 1)
    spread = spread[:, : weight.shape[1]]
    codes = (weight / spread).to(torch.float8_e4m3fn).float()
    meant = codes * spread
    error = weight.abs() / 16 + scale.max() * 2**-10
    stored = {
        "matrix": scale,
        "exponents": scale,
        "column": scale[:, :1],
        "scalar": scale[0, 0],
        "one": scale[0],
    }[shape]
    dtype = torch.float8_e8m0fnu if shape == "exponents" else torch.float32
    parts = {"weight": codes.to(torch.float8_e4m3fn), name: stored.to(dtype, copy=True)}
    return Quantized(parts, meant, error)


def int_codes(
    weight: Tensor, group: int, bits: int, zero_points: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(codes [out, in] from 0 up, zero points and scales [out, groups]); scales as float16 holds them."""
    parts = weight.view(len(weight), -1, group)
    top = 2**bits - 1
    if zero_points:
        low, high = parts.amin(2).clamp(max=0), parts.amax(2).clamp(min=0)
        scales = ((high - low) / top * 1.001).half().float()
        zeros = (-low / scales).round().long()
    else:
        scales = (parts.abs().amax(2) / (2 ** (bits - 1) - 1) * 1.001).half().float()
        zeros = torch.full(scales.shape, 2 ** (bits - 1))
    codes = ((parts / scales[..., None]).round().long() + zeros[..., None]).clamp(0, top)
    return codes.view(weight.shape), zeros, scales


def meant(codes: Tensor, zeros: Tensor, scales: Tensor, group_of: list[int]) -> Tensor:
    return (codes - zeros[:, group_of]).float() * scales[:, group_of]


def word(numbers: list[int], bits: int) -> int:
    """One int32 of the numbers, the first in the lowest bits."""
    value = sum(number << (bits * i) for i, number in enumerate(numbers)) & 0xFFFFFFFF
    return value - 2**32 if value >= 2**31 else value


def pack_columns(matrix: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Words along the columns, zeros at the end; nibble order[j] of a word holds its number j."""
    size = 32 // bits
    packed = []
    for row in matrix.tolist():
        row = row + [0] * (-len(row) % size)
        words = [row[i : i + size] for i in range(0, len(row), size)]
        if order is not None:
            words = [[numbers[order.index(nibble)] for nibble in range(size)] for numbers in words]
        packed.append([word(numbers, bits) for numbers in words])
    return torch.tensor(packed, dtype=torch.int32)


def awq(weight: Tensor) -> Quantized:
    codes, zeros, scales = int_codes(weight, GROUP, 4, zero_points=True)
    parts = {
        "qweight": pack_columns(codes.t(), 4, AWQ_NIBBLE),
        "qzeros": pack_columns(zeros.t(), 4, AWQ_NIBBLE),
        "scales": scales.t().half().contiguous(),
    }
    group_of = [i // GROUP for i in range(weight.shape[1])]
    return Quantized(parts, meant(codes, zeros, scales, group_of), scales[:, group_of])


def gptq(
    weight: Tensor, bits: int = 4, *, less_one: bool = True, act_order: bool = False
) -> Quantized:
    """act_order: the columns are quantized in another order, and g_idx says which group each is in."""
    columns = weight.shape[1]
    order = (
        torch.randperm(columns, generator=torch.Generator().manual_seed(7)) if act_order else None
    )
    ordered = weight if order is None else weight[:, order]
    codes, zeros, scales = int_codes(ordered, GROUP, bits, zero_points=True)
    group_of = [i // GROUP for i in range(columns)]
    if order is not None:
        back = order.argsort()
        codes, group_of = codes[:, back], [group_of[i] for i in back.tolist()]
    stored = pack_columns(zeros.t(), bits)
    if less_one:
        ones = word([1] * (32 // bits), bits)
        stored = torch.tensor(
            [[wrap(value - ones) for value in row] for row in stored.tolist()], dtype=torch.int32
        )
    parts = {
        "qweight": pack_columns(codes, bits).t().contiguous(),
        "qzeros": stored,
        "scales": scales.t().half().contiguous(),
        "g_idx": torch.tensor(group_of, dtype=torch.int32),
    }
    return Quantized(parts, meant(codes, zeros, scales, group_of), scales[:, group_of])


def wrap(value: int) -> int:
    value &= 0xFFFFFFFF
    return value - 2**32 if value >= 2**31 else value


def int8(weight: Tensor, *, per_tensor: bool = False, zero_points: bool = False) -> Quantized:
    """compressed-tensors' int-quantized."""
    flat = weight.reshape(1, -1) if per_tensor else weight
    codes, zeros, scales = int_codes(flat, flat.shape[1], 8, zero_points)
    group_of = [0] * flat.shape[1]
    parts = {
        "weight": (codes - 128).to(torch.int8).view(weight.shape),
        "weight_scale": scales.view(-1),
    }
    if not per_tensor:
        parts["weight_scale"] = scales
    if zero_points:
        parts["weight_zero_point"] = (zeros - 128).to(torch.int8)
    unpacked = meant(codes, zeros, scales, group_of).view(weight.shape)
    return Quantized(parts, unpacked, scales[:, group_of].view(weight.shape))


def packed(
    weight: Tensor, bits: int = 4, *, group: int | None = GROUP, zero_points: bool = False
) -> Quantized:
    """compressed-tensors' pack-quantized."""
    group = group or weight.shape[1]
    codes, zeros, scales = int_codes(weight, group, bits, zero_points)
    parts = {
        "weight_packed": pack_columns(codes, bits),
        "weight_scale": scales.half(),
        "weight_shape": torch.tensor(weight.shape),
    }
    if zero_points:
        parts["weight_zero_point"] = pack_columns(zeros.t(), bits).t().contiguous()
    group_of = [i // group for i in range(weight.shape[1])]
    return Quantized(parts, meant(codes, zeros, scales, group_of), scales[:, group_of])


def mxfp4(weight: Tensor) -> Quantized:
    """weight: [experts, in, out], in blocks of 32 along `in`, as gpt-oss has them."""
    experts, columns, rows = weight.shape
    parts = weight.transpose(1, 2).reshape(experts, rows, columns // 32, 32)
    exponents = (parts.abs().amax(-1) / 6).log2().ceil()
    scaled, numbers = parts / 2.0 ** exponents[..., None], torch.tensor(E2M1)
    codes = (scaled.abs()[..., None] - numbers).abs().argmin(-1)
    unpacked = numbers[codes].copysign(scaled) * 2.0 ** exponents[..., None]
    nibbles = codes + 8 * (scaled < 0)
    stored = {"blocks": nibbles[..., ::2] | nibbles[..., 1::2] << 4, "scales": exponents + 127}
    return Quantized(
        {name: tensor.to(torch.uint8) for name, tensor in stored.items()},
        unpacked.view(experts, rows, columns).transpose(1, 2),
        weight.abs() / 3 + weight.abs().max() / 12,
    )


def bnb4(
    weight: Tensor,
    quant_type: str,
    *,
    block: int = BNB_BLOCK,
    nested: bool = False,
    storage: torch.dtype = torch.uint8,
) -> Quantized:
    """bitsandbytes' quantize_4bit: blocks of the numbers of all rows, one after another, the last one short.

    nested: each largest magnitude is a code itself, from which their mean was subtracted before.
    """
    flat = weight.flatten()
    numbers = torch.tensor(BNB_TYPES[quant_type])
    largest = float(numbers.max())
    absmax = torch.stack([part.abs().max() for part in flat.split(block)])
    state = {"quant_type": quant_type, "blocksize": block, "dtype": "float32"}
    state["shape"] = list(weight.shape)
    parts = {"absmax": absmax, "quant_map": numbers / largest}
    if nested:
        offset = float(absmax.mean())
        levels = torch.linspace(-1, 1, 256)
        scales = torch.stack([part.abs().max() for part in (absmax - offset).split(NESTED_BLOCK)])
        of_block = scales.repeat_interleave(NESTED_BLOCK)[: len(absmax)]
        chosen = ((absmax - offset) / of_block)[:, None] - levels
        parts["absmax"] = chosen.abs().argmin(1).to(torch.uint8)
        parts |= {"nested_absmax": scales, "nested_quant_map": levels}
        state |= {"nested_blocksize": NESTED_BLOCK, "nested_dtype": "float32"}
        state["nested_offset"] = offset
        absmax = levels[parts["absmax"].int()] * of_block + offset
    scale = (absmax / largest).repeat_interleave(block)[: len(flat)]
    codes = ((flat / scale)[:, None] - numbers).abs().argmin(1)
    parts[f"quant_state.bitsandbytes__{quant_type}"] = torch.tensor(
        list(json.dumps(state).encode()), dtype=torch.uint8
    )
    padded = torch.cat((codes, codes.new_zeros(len(codes) % 2))).to(torch.uint8)
    stored = {f"weight.{name}": tensor for name, tensor in parts.items()}
    stored["weight"] = (padded[::2] << 4 | padded[1::2]).view(storage)[:, None]
    unpacked = (numbers[codes] * scale).view(weight.shape)
    return Quantized(stored, unpacked, 0.2 * weight.abs().max())


def bnb8(weight: Tensor) -> Quantized:
    """bitsandbytes' LLM.int8."""
    largest = weight.abs().amax(1)
    codes = (weight / largest[:, None] * 127).round()
    scales = largest / 127
    parts = {
        "weight": codes.to(torch.int8),
        "SCB": largest,
        "weight_format": torch.tensor(0, dtype=torch.uint8),
    }
    return Quantized(parts, codes * scales[:, None], scales[:, None])


def bnb4_config(quant_type: str, **more: Any) -> dict[str, Any]:
    """What transformers writes of BitsAndBytesConfig, or most of it."""
    return {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_compute_dtype": "bfloat16",
        "bnb_4bit_quant_type": quant_type,
        "llm_int8_skip_modules": None,
        **more,
    }


def group(weights: dict[str, Any], form: str, **more: Any) -> dict[str, Any]:
    """compressed-tensors' configuration of one group."""
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, **more}},
    }


def of_group(bits: int, size: int | None = GROUP, symmetric: bool = True) -> dict[str, Any]:
    strategy = "channel" if size is None else "group"
    return {
        "num_bits": bits,
        "type": "int",
        "strategy": strategy,
        "group_size": size,
        "symmetric": symmetric,
    }


FP8_BLOCKS = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": list(BLOCK),
}
FLOAT = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
INT = {"num_bits": 8, "type": "int", "symmetric": True}
ACTIVATIONS = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}
FORMATS = {
    "fp8_blocks": Format(FP8_BLOCKS, lambda w: fp8(w, BLOCK, "weight_scale_inv", "matrix")),
    "fp8_exponents": Format(
        FP8_BLOCKS | {"scale_fmt": "ue8m0"},
        lambda w: fp8(w, BLOCK, "weight_scale_inv", "exponents"),
    ),
    "fp8_tensor": Format(
        {"quant_method": "fp8", "activation_scheme": "static"},
        lambda w: fp8(w, (None, None), "weight_scale", "scalar"),
    ),
    "modelopt_fp8": Format(
        {"quant_method": "modelopt", "quant_algo": "FP8", "producer": {"name": "modelopt"}},
        lambda w: fp8(w, (None, None), "weight_scale", "scalar"),
    ),
    "ct_fp8_tensor": Format(
        group(FLOAT | {"strategy": "tensor"}, "float-quantized", input_activations=ACTIVATIONS),
        lambda w: fp8(w, (None, None), "weight_scale", "one"),
    ),
    "ct_fp8_channel": Format(
        group(FLOAT | {"strategy": "channel"}, "float-quantized", input_activations=ACTIVATIONS),
        lambda w: fp8(w, (1, None), "weight_scale", "column"),
    ),
    "ct_fp8_block": Format(
        group(FLOAT | {"strategy": "block", "block_structure": list(BLOCK)}, "naive-quantized"),
        lambda w: fp8(w, BLOCK, "weight_scale", "matrix"),
    ),
    "ct_int8_channel": Format(group(INT | {"strategy": "channel"}, "int-quantized"), int8),
    "ct_int8_tensor": Format(
        group(INT | {"strategy": "tensor"}, "int-quantized"), lambda w: int8(w, per_tensor=True)
    ),
    "ct_int8_asymmetric": Format(
        group(INT | {"strategy": "channel", "symmetric": False}, "int-quantized"),
        lambda w: int8(w, zero_points=True),
    ),
    "ct_packed4": Format(group(of_group(4), "pack-quantized"), packed),
    "ct_packed4_asymmetric": Format(
        group(of_group(4, symmetric=False), "pack-quantized"), lambda w: packed(w, zero_points=True)
    ),
    "ct_packed8_channel": Format(
        group(of_group(8, None), "pack-quantized"), lambda w: packed(w, 8, group=None)
    ),
    "awq": Format(
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": GROUP,
            "zero_point": True,
            "version": "gemm",
        },
        awq,
    ),
    "gptq": Format(GPTQ, gptq),
    "gptq_act_order": Format(GPTQ | {"desc_act": True}, lambda w: gptq(w, act_order=True)),
    "gptq_v2": Format(GPTQ | {"checkpoint_format": "gptq_v2"}, lambda w: gptq(w, less_one=False)),
    "bnb_nf4": Format(bnb4_config("nf4"), lambda w: bnb4(w, "nf4")),
    "bnb_nf4_nested": Format(
        bnb4_config("nf4", bnb_4bit_use_double_quant=True), lambda w: bnb4(w, "nf4", nested=True)
    ),
    "bnb_fp4": Format(bnb4_config("fp4"), lambda w: bnb4(w, "fp4")),
    "bnb_fp4_nested_stored_as_bfloat16": Format(
        bnb4_config("fp4", bnb_4bit_use_double_quant=True, bnb_4bit_quant_storage="bfloat16"),
        lambda w: bnb4(w, "fp4", nested=True, storage=torch.bfloat16),
    ),
    "bnb_nf4_blocks_of_32": Format(bnb4_config("nf4"), lambda w: bnb4(w, "nf4", block=32)),
    "bnb_int8": Format(
        {"quant_method": "bitsandbytes", "load_in_4bit": False, "load_in_8bit": True}, bnb8
    ),
    "gptq8": Format(GPTQ | {"bits": 8}, lambda w: gptq(w, 8)),
}


@dataclass(frozen=True)
class QuantizedCheckpoint:
    """Three folders of one model: quantized, with what that means as plain numbers, and as it was before."""

    folder: Path
    unpacked: Path
    original: Path


def quantize_checkpoint(
    original: Path, target: Path, form: Format, linear: str | tuple[str, ...] = "_proj"
) -> QuantizedCheckpoint:
    """Quantize every linear layer of a checkpoint whose name ends so."""
    tensors = load_file(original / "model.safetensors")
    made = {
        name: form.quantize(weight)
        for name, weight in tensors.items()
        if name.endswith(".weight") and name.removesuffix(".weight").endswith(linear)
    }
    parts = {
        f"{name.removesuffix('weight')}{part}": tensor
        for name, quantized in made.items()
        for part, tensor in quantized.parts.items()
    }
    return write(original, target, made, parts, form.config)


def quantize_experts(original: Path, target: Path) -> QuantizedCheckpoint:
    """gpt-oss' experts in MXFP4."""
    tensors = load_file(original / "model.safetensors")
    made = {
        name: mxfp4(weight)
        for name, weight in tensors.items()
        if name.endswith(("gate_up_proj", "down_proj"))
    }
    parts = {
        f"{name}_{part}": tensor
        for name, quantized in made.items()
        for part, tensor in quantized.parts.items()
    }
    config = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"],
    }
    return write(original, target, made, parts, config)


def write(
    original: Path,
    target: Path,
    made: dict[str, Quantized],
    parts: dict[str, Tensor],
    config: dict[str, Any],
) -> QuantizedCheckpoint:
    """made: the quantized weights by name. parts: what the files hold in their place."""
    tensors = load_file(original / "model.safetensors")
    assert made
    for name, quantized in made.items():
        assert ((quantized.weight - tensors[name]).abs() <= quantized.largest_error).all(), name
    contents = {
        target / "quantized": {name: tensor for name, tensor in tensors.items() if name not in made}
        | parts,
        target / "unpacked": tensors | {name: quantized.weight for name, quantized in made.items()},
    }
    for folder, content in contents.items():
        shutil.copytree(original, folder)
        save_file(
            {name: tensor.contiguous() for name, tensor in content.items()},
            folder / "model.safetensors",
        )
    file = target / "quantized" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": config}))
    return QuantizedCheckpoint(target / "quantized", target / "unpacked", original)
