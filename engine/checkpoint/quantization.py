"""The quantization section of config.json: bits of a weight, and which weights share a scale."""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from reprlib import repr as brief  # short
from typing import Any

from engine.errors import ConfigError, UnsupportedModel

SUPPORTED = (
    "supported are fp8 (float8_e4m3fn, a scale for a tensor or a block), compressed-tensors (fp8, int8, packed int4 "
    "and int8), modelopt (fp8), awq (int4, gemm), gptq (int4, int8), bitsandbytes (nf4, fp4, int8) and gpt-oss' mxfp4"
)
PLAIN_FORMATS = ("float-quantized", "int-quantized", "naive-quantized")
PACKED_FORMAT = "pack-quantized"
USUAL_BLOCK = 64  # of bitsandbytes' four bits; each tensor has its own, in the files
#: compressed-tensors' strategies (the weights that share a scale), by (layout, kind, bits).
STRATEGIES = {
    ("plain", "float", 8): ("tensor", "channel", "block"),
    ("plain", "int", 8): ("tensor", "channel", "group"),
    ("packed", "int", 4): ("channel", "group"),
    ("packed", "int", 8): ("channel", "group"),
}


@dataclass(frozen=True)
class Scheme:
    """The way in which some modules of a checkpoint keep their weights [out, in].

    layout: "plain", a number for each weight; "packed", compressed-tensors' words of several numbers; "awq"; "gptq";
    "mxfp4"; or bitsandbytes' "bitsandbytes4" and "bitsandbytes8".
    kind: what the codes stand for, "float", "int", or the tables "nf" and "fp".
    block: the numbers of rows and of columns that share a scale; None stands for all of them.
    zero_points: whether each scale must have a zero point beside it. zero_shift: is added to the stored zero points.
    column_groups: whether the file must say which scale each column has.
    targets: the modules, as compressed-tensors writes them: names, "re:" patterns, names of classes.
    """

    layout: str
    kind: str
    bits: int
    block: tuple[int | None, int | None]
    zero_points: bool = False
    zero_shift: int = 0
    column_groups: bool = False
    scale_name: str = "weight_scale"
    targets: tuple[str, ...] = ("Linear",)


@dataclass(frozen=True)
class Quantization:
    """The quantization of a checkpoint's weights. Modules with plain tensors are not quantized."""

    method: str
    schemes: tuple[Scheme, ...]

    def scheme_of(self, module: str) -> Scheme | None:
        """Return the scheme of a quantized module: by its name, else by a pattern, else by the name of a class.

        A target that begins with a capital is the name of a class, and is taken to fit each module.
        """
        every = [(target, scheme) for scheme in self.schemes for target in scheme.targets]
        by_name = [scheme for target, scheme in every if target == module]
        by_pattern = [scheme for target, scheme in every if _matches(target, module)]
        by_class = [scheme for target, scheme in every if target[:1].isupper()]
        return next(iter(by_name + by_pattern + by_class), None)

    def __str__(self) -> str:
        numbers = dict.fromkeys(f"{scheme.kind}{scheme.bits}" for scheme in self.schemes)
        return f"{self.method}: {' and '.join(numbers)}"


def read_quantization(config: Mapping[str, Any]) -> Quantization | None:
    """Read the quantization section of config.json; None if there is none.

    Raises UnsupportedModel for a quantization that is not built, ConfigError for an impossible value.
    """
    values = config.get("quantization_config")
    if not values:
        return None
    try:
        method = values.get("quant_method")
        if method is None and (values.get("load_in_4bit") or values.get("load_in_8bit")):
            method = "bitsandbytes"  # transformers writes quant_method since 4.32
        if method not in READERS:
            raise UnsupportedModel(
                f"quantized weights of quant_method {method!r} are not supported; {SUPPORTED}"
            )
        return Quantization(method, READERS[method](values))
    except KeyError as error:
        raise ConfigError(f"quantization_config in config.json has no {error.args[0]!r}") from error
    except (TypeError, ValueError, AttributeError, re.error) as error:
        raise ConfigError(
            f"quantization_config in config.json holds a value of a wrong kind: {error}"
        ) from error


def _read_fp8(values: Mapping[str, Any]) -> tuple[Scheme, ...]:
    _refuse_unless(values, "fmt", (None, "e4m3"))
    _refuse_unless(values, "expert_dtype", (None, "fp8"))
    _refuse_unless(values, "scale_fmt", (None, "float", "ue8m0"))
    _refuse_unless(values, "activation_scheme", (None, "dynamic", "static"))
    block = _block(values.get("weight_block_size"))
    scale_name = "weight_scale" if block == (None, None) else "weight_scale_inv"
    return (Scheme("plain", "float", 8, block, scale_name=scale_name),)


def _read_awq(values: Mapping[str, Any]) -> tuple[Scheme, ...]:
    _refuse_unless(values, "bits", (4,))
    _refuse_unless(values, "zero_point", (None, True))
    for key in ("version", "format", "checkpoint_format"):
        _refuse_unless(values, key, (None, "gemm", "GEMM"))
    return (Scheme("awq", "int", 4, (1, _group_size(values)), zero_points=True),)


def _read_gptq(values: Mapping[str, Any]) -> tuple[Scheme, ...]:
    """Read AutoGPTQ's or GPTQModel's section; gptq stores zero points minus one, gptq_v2 as they are."""
    _refuse_unless(values, "bits", (4, 8))
    for key in ("checkpoint_format", "format"):
        _refuse_unless(values, key, (None, "gptq", "gptq_v2"))
    _refuse_unless(values, "is_marlin_format", (None, False))
    for pattern, changes in (values.get("dynamic") or {}).items():
        if changes and not pattern.startswith("-:"):  # "-:" leaves modules as they are
            raise UnsupportedModel(
                f"quantization_config: dynamic {brief(pattern)} is not supported; {SUPPORTED}"
            )
    stored_format = values.get("checkpoint_format") or values.get("format") or "gptq"
    shift = 1 if stored_format == "gptq" else 0
    has_column_groups = bool(values.get("desc_act"))
    scheme = Scheme("gptq", "int", values["bits"], (1, _group_size(values)), zero_points=True)
    return (replace(scheme, zero_shift=shift, column_groups=has_column_groups),)


def _read_compressed_tensors(values: Mapping[str, Any]) -> tuple[Scheme, ...]:
    for key in ("sparsity_config", "transform_config"):
        section = values.get(key) or {}
        if section.get("format", "dense") != "dense" or section.get("config_groups"):
            raise UnsupportedModel(
                f"quantization_config: {key} {brief(values[key])} is not supported; {SUPPORTED}"
            )
    groups = [group for group in values["config_groups"].values() if group.get("weights")]
    return tuple(
        _read_group(group, group.get("format") or values.get("format")) for group in groups
    )


def _read_bitsandbytes(values: Mapping[str, Any]) -> tuple[Scheme, ...]:
    """Read what transformers' BitsAndBytesConfig writes. The weight files say how large a block is."""
    is_four_bits = values.get("load_in_4bit") is True
    if is_four_bits == (values.get("load_in_8bit") is True):
        found = f"load_in_4bit {values.get('load_in_4bit')!r}, load_in_8bit {values.get('load_in_8bit')!r}"
        raise UnsupportedModel(
            f"quantization_config: {found}; one of them must be true for weights of bitsandbytes"
        )
    if not is_four_bits:
        return (Scheme("bitsandbytes8", "int", 8, (1, None)),)
    _refuse_unless(values, "bnb_4bit_quant_type", (None, "nf4", "fp4"))
    kind = "nf" if values.get("bnb_4bit_quant_type") == "nf4" else "fp"
    return (Scheme("bitsandbytes4", kind, 4, (1, USUAL_BLOCK)),)


def _read_modelopt(values: Mapping[str, Any]) -> tuple[Scheme, ...]:
    """Read what ModelOpt writes. Without a quant_algo it has quantized nothing but the KV cache."""
    _refuse_unless(values, "quant_algo", (None, "FP8"))
    if values.get("quant_algo") is None:
        return ()
    return (Scheme("plain", "float", 8, (None, None)),)


def _read_group(group: Mapping[str, Any], form: str | None) -> Scheme:
    if form not in (*PLAIN_FORMATS, PACKED_FORMAT):
        raise UnsupportedModel(f"compressed-tensors' format {form!r} is not supported; {SUPPORTED}")
    weights = group["weights"]
    layout = "packed" if form == PACKED_FORMAT else "plain"
    kind = weights.get("type", "int")
    bits = weights["num_bits"]
    strategy = weights.get("strategy")
    strategies = STRATEGIES.get((layout, kind, bits))
    if strategies is None:
        raise UnsupportedModel(
            f"{kind}{bits} weights in format {form!r} are not supported; {SUPPORTED}"
        )
    _refuse_unless(weights, "strategy", strategies)
    _refuse_unless(weights, "dynamic", (None, False))
    block = {
        "tensor": (None, None),
        "channel": (1, None),
        "group": (1, _group_size(weights)),
        "block": _block(weights.get("block_structure")),
    }[strategy]
    targets = tuple(group["targets"])
    for target in targets:
        _matches(target, "")  # raises re.error if the target holds a faulty pattern
    return Scheme(
        layout,
        kind,
        bits,
        block,
        zero_points=not weights.get("symmetric", True),
        column_groups=weights.get("actorder") in (True, "group", "dynamic"),
        targets=targets,
    )


def _refuse_unless(values: Mapping[str, Any], key: str, allowed: Collection[Any]) -> None:
    value = values.get(key)
    if value not in allowed:
        supported = ", ".join(
            repr(allowed_value) for allowed_value in allowed if allowed_value is not None
        )
        raise UnsupportedModel(
            f"quantization_config: {key} {brief(value)} is not supported; supported: {supported}"
        )


def _block(sizes: Any) -> tuple[int | None, int | None]:
    """Return the [rows, columns] that share a scale; None stands for a whole dimension."""
    if sizes is None:
        return None, None
    rows, columns = sizes.split("x") if isinstance(sizes, str) else sizes
    if min(int(rows), int(columns)) < 1:
        raise ValueError(f"a block of {brief(sizes)} weights")
    return int(rows), int(columns)


def _group_size(values: Mapping[str, Any]) -> int | None:
    """Return the number of columns that share a scale; None if group_size is -1 or null: all columns share one."""
    size = values.get("group_size")
    if size is None or size == -1:
        return None
    if type(size) is not int or size < 1:
        raise ValueError(f"group_size {brief(size)}")
    return size


def _matches(target: str, module: str) -> bool:
    return target.startswith("re:") and re.match(target[3:], module) is not None


READERS: dict[str, Callable[[Mapping[str, Any]], tuple[Scheme, ...]]] = {
    "fp8": _read_fp8,
    "awq": _read_awq,
    "gptq": _read_gptq,
    "compressed-tensors": _read_compressed_tensors,
    "bitsandbytes": _read_bitsandbytes,
    "modelopt": _read_modelopt,
    "mxfp4": lambda values: (Scheme("mxfp4", "float", 4, (1, 32)),),
}
