"""Quantized weights as a model sees them: `x.weight`, where the files hold x's numbers, scales and so on."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from engine.checkpoint.mxfp4 import Mxfp4Tensor
from engine.checkpoint.packed_words import PackedIntegers
from engine.checkpoint.quantization import Quantization, Scheme
from engine.checkpoint.quantized_tensor import Codes, QuantizedTensor, count_scales
from engine.checkpoint.weights import CheckpointTensor
from engine.errors import DamagedWeights, MissingWeights, WeightMismatch

#: Of a module x the tensors that say that its weight is quantized, and what may lie beside them.
CODES = ("weight_packed", "qweight", "weight")
BESIDE = (
    "weight_scale",
    "weight_scale_inv",
    "weight_zero_point",
    "weight_shape",
    "weight_g_idx",
    "scales",
    "qzeros",
    "g_idx",
)
#: Of the activations and of the KV cache, which are not quantized here.
PASSED_OVER = (
    "input_scale",
    "input_zero_point",
    "output_scale",
    "output_zero_point",
    "activation_scale",
    "q_scale",
    "k_scale",
    "v_scale",
    "q_zero_point",
    "k_zero_point",
    "v_zero_point",
    "kv_scale",
)
PLAIN_DTYPES = {"float": "F8_E4M3", "int": "I8"}
BLOCKS, SCALES = "_blocks", "_scales"  # of gpt-oss' experts
ONE_BYTE = ("F8_E4M3", "F8_E5M2", "I8", "U8")
FLOATS = ("F32", "BF16", "F16")


class Parts:
    """The tensors of one quantized module."""

    def __init__(self, tensors: Mapping[str, CheckpointTensor], module: str) -> None:
        self._tensors, self.module = tensors, module

    def holds(self, part: str) -> bool:
        """Whether the files have this part."""
        return f"{self.module}.{part}" in self._tensors

    def matrix(self, part: str, dtype: str) -> CheckpointTensor:
        """A part of two dimensions. Raises MissingWeights or WeightMismatch, as `get` does."""
        tensor = self.get(part, (dtype,))
        if len(tensor.shape) != 2 or 0 in tensor.shape:
            raise WeightMismatch(
                f"{tensor.name!r} in {tensor.path} has shape {list(tensor.shape)}, no matrix's"
            )
        return tensor

    def get(self, part: str, dtypes: tuple[str, ...], *shapes: tuple[int, ...]) -> CheckpointTensor:
        """A part of one of these dtypes and shapes."""
        name = f"{self.module}.{part}"
        if name not in self._tensors:
            raise MissingWeights(
                f"{self.module!r} is quantized and {name!r} is in no file of the checkpoint; fetch it again"
            )
        tensor = self._tensors[name]
        if tensor.dtype not in dtypes:
            raise WeightMismatch(
                f"{name!r} in {tensor.path} holds {tensor.dtype}, {' or '.join(dtypes)} expected by "
                "quantization_config in config.json"
            )
        if shapes and tensor.shape not in shapes:
            raise WeightMismatch(
                f"{name!r} in {tensor.path} has shape {list(tensor.shape)}, {list(shapes[0])} expected by "
                "its weight and quantization_config in config.json"
            )
        return tensor


def unpacked(
    tensors: Mapping[str, CheckpointTensor], quantization: Quantization | None
) -> dict[str, CheckpointTensor]:
    """The tensors by the names that they have in a checkpoint that is not quantized.

    What belongs to activations and to the KV cache, which are computed as in such a checkpoint, is left out.
    Raises MissingWeights or WeightMismatch for a part that is not there or is of another shape or dtype.
    """
    if quantization is None:
        return dict(tensors)
    weights: dict[str, CheckpointTensor] = {}
    taken = set()
    for name in tensors:
        module, _, part = name.rpartition(".")
        if quantization.method == "mxfp4" and part.endswith(BLOCKS):
            weights[name.removesuffix(BLOCKS)] = _open_mxfp4(tensors, name.removesuffix(BLOCKS))
            taken |= {name, name.removesuffix(BLOCKS) + SCALES}
        elif part in CODES and _is_quantized(tensors, module, part):
            scheme = quantization.scheme_of(module)
            if scheme is None:
                raise WeightMismatch(
                    f"{tensors[name].path} holds {name!r} quantized, and no group of quantization_config in "
                    "config.json is about it"
                )
            weights[f"{module}.weight"] = OPENERS[scheme.layout](Parts(tensors, module), scheme)
            taken |= {f"{module}.{each}" for each in (part, *BESIDE)}
        elif part in PASSED_OVER:
            taken.add(name)
    return weights | {name: tensor for name, tensor in tensors.items() if name not in taken}


def _is_quantized(tensors: Mapping[str, CheckpointTensor], module: str, part: str) -> bool:
    scaled = f"{module}.weight_scale" in tensors or f"{module}.weight_scale_inv" in tensors
    return part != "weight" or scaled or tensors[f"{module}.weight"].dtype in ONE_BYTE


def _open_plain(parts: Parts, scheme: Scheme) -> CheckpointTensor:
    codes = parts.matrix("weight", PLAIN_DTYPES[scheme.kind])
    rows, columns = count_scales(codes.shape, scheme.block)
    shapes = [(rows, columns), (rows,), ()][: 1 if columns > 1 else 2 if rows > 1 else 3]
    scale_name = "weight_scale_inv" if parts.holds("weight_scale_inv") else scheme.scale_name
    scale = parts.get(scale_name, FLOATS if scheme.kind == "int" else (*FLOATS, "F8_E8M0"), *shapes)
    has_zero_points = scheme.zero_points or parts.holds("weight_zero_point")
    zero_points = parts.get("weight_zero_point", ("I8",), *shapes) if has_zero_points else 0
    return QuantizedTensor(codes.name, codes, scheme.block, scale, zero_points=zero_points)


def _open_packed(parts: Parts, scheme: Scheme) -> CheckpointTensor:
    """compressed-tensors' words: numbers along the rows, 2^(bits - 1) added to each."""
    shape = parts.get("weight_shape", ("I64", "I32"), (2,))
    rows, columns = shape.whole().tolist()
    size = 32 // scheme.bits
    words = parts.matrix("weight_packed", "I32")
    if words.shape != (rows, -(-columns // size)):
        raise DamagedWeights(
            f"{shape.name!r} in {shape.path} is {[rows, columns]}, which words of shape {list(words.shape)} "
            f"in {words.name!r} are not; fetch the files again"
        )
    num_scales = count_scales((rows, columns), scheme.block)
    zero_points: Codes | int = 1 << (scheme.bits - 1)
    if scheme.zero_points or parts.holds("weight_zero_point"):
        stored = parts.get("weight_zero_point", ("I32",), (-(-num_scales[0] // size), num_scales[1]))
        zero_points = PackedIntegers(stored, num_scales, scheme.bits, dim=0, transposed=False)
    return QuantizedTensor(
        f"{parts.module}.weight",
        PackedIntegers(words, (rows, columns), scheme.bits, dim=1, transposed=False),
        scheme.block,
        parts.get("weight_scale", FLOATS, num_scales),
        zero_points=zero_points,
        group_of_column=_group_of_column(parts, "weight_g_idx", columns, scheme),
    )


def _open_transposed(parts: Parts, scheme: Scheme) -> CheckpointTensor:
    """Both keep the transpose, [in, out]: a word of AWQ's is 8 columns of it, of GPTQ's 8 or 4 rows."""
    words = parts.matrix("qweight", "I32")
    size = 32 // scheme.bits
    is_awq = scheme.layout == "awq"
    dim = 1 if is_awq else 0
    columns, rows = (total * (size if dim == i else 1) for i, total in enumerate(words.shape))
    num_scales = count_scales((rows, columns), scheme.block)
    zero_points = parts.get("qzeros", ("I32",), (num_scales[1], rows // size))
    return QuantizedTensor(
        f"{parts.module}.weight",
        PackedIntegers(words, (rows, columns), scheme.bits, dim=dim, transposed=True, interleaved=is_awq),
        scheme.block,
        parts.get("scales", FLOATS, (num_scales[1], rows)),
        transposed=True,
        zero_points=PackedIntegers(
            zero_points,
            num_scales,
            scheme.bits,
            dim=1,
            transposed=True,
            interleaved=is_awq,
            shift=scheme.zero_shift,
        ),
        group_of_column=_group_of_column(parts, "g_idx", columns, scheme)
        if scheme.layout == "gptq"
        else None,
    )


def _group_of_column(parts: Parts, part: str, columns: int, scheme: Scheme) -> CheckpointTensor | None:
    if not scheme.column_groups and not parts.holds(part):
        return None
    return parts.get(part, ("I32", "I64"), (columns,))


def _open_mxfp4(tensors: Mapping[str, CheckpointTensor], name: str) -> CheckpointTensor:
    module, _, last = name.rpartition(".")
    parts = Parts(tensors, module)
    blocks = parts.get(last + BLOCKS, ("U8",))
    if len(blocks.shape) != 4 or blocks.shape[3] != 16:
        raise WeightMismatch(
            f"{blocks.name!r} in {blocks.path} has shape {list(blocks.shape)}, "
            "[experts, out, in / 32, 16] expected"
        )
    return Mxfp4Tensor(name, blocks, parts.get(last + SCALES, ("U8",), blocks.shape[:3]))


OPENERS: dict[str, Callable[[Parts, Scheme], CheckpointTensor]] = {
    "plain": _open_plain,
    "packed": _open_packed,
    "awq": _open_transposed,
    "gptq": _open_transposed,
}
