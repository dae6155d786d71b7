"""Quantized weights (AWQ, GPTQ, compressed-tensors, bitsandbytes, fp8, mxfp4), read as they are or unpacked."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from engine.checkpoint.bitsandbytes import (
    FOUR_BIT_PARTS,
    INT8_PARTS,
    FourBitCodes,
    open_four_bits,
    open_row_scales,
)
from engine.checkpoint.kv_scales import is_kv_scale
from engine.checkpoint.mxfp4 import Mxfp4Tensor
from engine.checkpoint.packed_form import PackedForm, PackedPart, check_scales, damaged
from engine.checkpoint.parts import FLOATS, Parts
from engine.checkpoint.quantization import Quantization, Scheme
from engine.checkpoint.weights import CheckpointTensor
from engine.errors import WeightMismatch
from engine.kernels.products.codes import INTEGERS, NUMBERS

#: Weights that are unpacked together: their temporaries stay in the processor's cache.
AT_ONCE = 1 << 20
#: By safetensors' dtype: the dtype in which scales stay. Others become float32.
SCALE_DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16}
NAN_MAGNITUDE = 0x7F  # of e4m3


class QuantizedTensor(CheckpointTensor):
    """A quantized weight [out, in]. Reading it returns (code - zero point) * scale, in float32.

    Some kinds of codes stand for the numbers of a table, and have no zero points.

    block: the numbers of rows and of columns that share a scale; None stands for a whole dimension.
    scale: a matrix with a scale for each block; if `transposed`, the transpose of that matrix.
    zero_points: one for each block, or one for all blocks.
    group_of_column: [in], the group of columns to which each column belongs; None if a group's columns are adjacent.
    """

    def __init__(
        self,
        name: str,
        codes: Codes,
        block: tuple[int | None, int | None],
        scale: CheckpointTensor,
        *,
        transposed: bool = False,
        zero_points: Codes | int = 0,
        group_of_column: CheckpointTensor | None = None,
    ) -> None:
        self.name = name
        self.path = codes.path
        self.dtype = "F32"
        self.shape = codes.shape
        self._codes = codes
        self._scale = scale
        self._zero_points = zero_points
        self._transposed = transposed
        self._group_of_column = group_of_column
        self._block = tuple(size or total for size, total in zip(block, self.shape, strict=True))
        self._num_scales = count_scales(self.shape, block)

    @property
    def packed_form(self) -> PackedForm | None:
        """The form in which the weight may stay packed; None if the columns of a group are not adjacent."""
        if self._group_of_column is not None:
            return None
        group = None if self._num_scales[1] == 1 else self._block[1]
        return PackedForm(self._kind, group, SCALE_DTYPES.get(self._scale.dtype, torch.float32))

    @property
    def _kind(self) -> str:
        if isinstance(self._codes, CheckpointTensor):
            return "int8" if self._codes.dtype == "I8" else "fp8"
        return self._codes.kind

    def packed_part(self, rows: slice, columns: slice, group: int | None) -> PackedPart:
        """Read these rows and columns, on the CPU. Raises DamagedWeights.

        group: the number of columns of the result that share a scale; None if each row has one scale. A stored group
        must be a multiple of it.
        """
        scale = self._scale.whole()
        check_scales(self._scale, scale, self._kind)
        scale = scale.t() if self._transposed else scale.reshape(self._num_scales)
        row_groups = torch.arange(self.shape[0])[rows] // self._block[0]
        groups = torch.zeros(1, dtype=torch.int64)
        if group is not None:
            groups = torch.arange(columns.start, columns.stop, group) // self._block[1]
        codes = self._codes.part(rows, columns)
        scales = scale[:, groups][row_groups]
        if self._kind == "fp8":
            codes = codes.contiguous().view(torch.uint8)
            if ((codes & NAN_MAGNITUDE) == NAN_MAGNITUDE).any():
                raise damaged(self, "has numbers that are NaN or infinite")
        if self._kind not in INTEGERS:
            return PackedPart(codes, scales, None)
        shift = 0
        if codes.dtype == torch.int8:
            shift = 1 << 7  # makes signed codes unsigned
            codes = (codes.to(torch.int16) + shift).to(torch.uint8)
        if isinstance(self._zero_points, int):
            zeros = torch.full(scales.shape, self._zero_points + shift, dtype=torch.uint8)
        else:
            stored = self._zero_points.part().reshape(self._num_scales)[:, groups][row_groups]
            zeros = (stored.to(torch.int16) + shift).to(torch.uint8)
        return PackedPart(codes, scales, zeros)

    def part(self, *ranges: slice) -> Tensor:
        """Unpack these rows and columns, on the CPU. Raises DamagedWeights."""
        scale = self._scale.whole().float()
        scale = scale.t() if self._transposed else scale.reshape(self._num_scales)
        zero_points = self._zero_points
        if not isinstance(zero_points, int):
            zeros = zero_points.part().float().reshape(self._num_scales)
        groups = [
            torch.arange(size) // block for size, block in zip(self.shape, self._block, strict=True)
        ]
        if self._group_of_column is not None:
            groups[1] = self._group_of_column.whole().long()
            if ((groups[1] < 0) | (groups[1] >= self._num_scales[1])).any():
                problem = f"names other groups than the {self._num_scales[1]} that have scales"
                raise damaged(self._group_of_column, problem)
        for dim, part in enumerate(ranges):
            groups[dim] = groups[dim][part]
        codes = self._codes.part(*ranges).contiguous()
        unpacked = torch.empty(codes.shape, dtype=torch.float32)
        step = max(1, AT_ONCE // max(1, codes.shape[1]))
        for first in range(0, len(codes), step):
            chunk = unpacked[first : first + step]
            chunk.copy_(self._numbers(codes[first : first + step]))
            rows = groups[0][first : first + step]
            if isinstance(zero_points, int):
                chunk -= zero_points
            else:
                chunk -= _spread(zeros, rows, groups[1])
            chunk *= _spread(scale, rows, groups[1])
            # The sum is a quick test. As finite numbers may overflow in it, the slow test decides.
            if not chunk.sum().isfinite() and not chunk.isfinite().all():
                culprit = self if scale.isfinite().all() else self._scale
                raise damaged(culprit, "has numbers that are NaN or infinite")
        return unpacked

    def _numbers(self, codes: Tensor) -> Tensor:
        """Return the numbers that codes stand for, before zero points are subtracted."""
        if self._kind in NUMBERS:
            return torch.tensor(NUMBERS[self._kind])[codes.int()]
        # Converting to float16 first is exact, and several times faster than converting to float32 directly.
        return codes.half() if codes.dtype == torch.float8_e4m3fn else codes


def count_scales(shape: tuple[int, ...], block: tuple[int | None, int | None]) -> tuple[int, ...]:
    """Return the number of scales of a weight [out, in] in each dimension.

    block: the numbers of rows and of columns that share a scale; None stands for a whole dimension.
    """
    sizes = [size or total for size, total in zip(block, shape, strict=True)]
    return tuple(-(-total // size) for size, total in zip(sizes, shape, strict=True))


def _spread(numbers: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Spread numbers, one for each block of a weight, over the weights of a part.

    numbers: [row groups, column groups]. rows, columns: the groups of the part's rows and columns. If there is only one
    column group, the result has one column.
    """
    chosen = numbers[rows]
    return chosen if numbers.shape[1] == 1 else chosen.index_select(1, columns)


LOW_BITS = {4: 0x11111111, 8: 0x01010101}


def unpack(
    words: Tensor, bits: int, dim: int, *, interleaved: bool = False, shift: int = 0
) -> Tensor:
    """Unpack words [rows, columns] int32 into uint8. Each word holds 32 / bits numbers of 4 or 8 bits along `dim`.

    The first number has the lowest bits. interleaved: AWQ's order, where a word's lower half holds the even ones of
    its eight numbers. shift: 1 adds one to each number, because GPTQ's files hold zero points minus one. The addition
    is of whole words, as GPTQ's subtraction was.
    """
    if dim == 0:
        return unpack(words.t(), bits, 1, interleaved=interleaved, shift=shift).t()
    if shift:
        words = (words.long() + LOW_BITS[bits]).int()
    # A column of one word calls itself contiguous whatever its strides are, and cannot be seen as bytes.
    numbers = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    if bits == 4:
        numbers = torch.stack((numbers & 15, numbers >> 4), -1).flatten(1)
    if interleaved:
        numbers = numbers.view(*words.shape, 2, 4).transpose(2, 3).flatten(1)
    return numbers


@dataclass(frozen=True)
class PackedIntegers:
    """A matrix [rows, columns] of packed numbers.

    words: the stored words; if `transposed`, they hold the matrix's transpose. dim: the dimension of `words` along
    which the numbers of a word lie. shape: of the matrix; its last words may hold unused numbers.
    bits, interleaved, shift: as for `unpack`.
    """

    words: CheckpointTensor
    shape: tuple[int, ...]
    bits: int
    dim: int
    transposed: bool = False
    interleaved: bool = False
    shift: int = 0

    @property
    def path(self) -> Path:
        return self.words.path

    @property
    def kind(self) -> str:
        return f"int{self.bits}"

    def part(self, *ranges: slice) -> Tensor:
        """Return these rows and columns, uint8; all of them without a range."""
        numbers = unpack(
            self.words.whole(), self.bits, self.dim, interleaved=self.interleaved, shift=self.shift
        )
        numbers = numbers.t() if self.transposed else numbers
        return numbers[: self.shape[0], : self.shape[1]][ranges]


Codes = CheckpointTensor | PackedIntegers | FourBitCodes  # a matrix [out, in] of small numbers
#: Quantized weights that may stay as they are stored.
PackableTensor = QuantizedTensor | Mxfp4Tensor

#: Names of the tensors that hold a module's quantized weight, and of those that may stand beside them.
CODES = ("weight_packed", "qweight", "weight")
BESIDE = (
    *("weight_scale", "weight_scale_inv", "weight_zero_point", "weight_shape", "weight_g_idx"),
    *("scales", "qzeros", "g_idx"),
    *FOUR_BIT_PARTS,
    *INT8_PARTS,
)
#: Names of tensors for quantized activations, which are not quantized here, and for KV caches.
PASSED_OVER = re.compile("(input|output|activation|q|k|v|kv)_(scale|zero_point)")
PLAIN_DTYPES = {"float": "F8_E4M3", "int": "I8"}
BLOCKS, SCALES = "_blocks", "_scales"  # of gpt-oss' experts
ONE_BYTE = ("F8_E4M3", "F8_E5M2", "I8", "U8")


def unpacked(
    tensors: Mapping[str, CheckpointTensor], quantization: Quantization | None
) -> dict[str, CheckpointTensor]:
    """Return all tensors by the names that they have in an unquantized checkpoint, without scales of a KV cache.

    Raises MissingWeights or WeightMismatch for a part that is missing, or has another shape or dtype.
    """
    if quantization is None:
        return {name: tensor for name, tensor in tensors.items() if not is_kv_scale(name)}
    weights: dict[str, CheckpointTensor] = {}
    taken = set()
    for name in tensors:
        module, _, part = name.rpartition(".")
        if quantization.method == "mxfp4" and part.endswith(BLOCKS):
            weights[name.removesuffix(BLOCKS)] = _open_mxfp4(tensors, name.removesuffix(BLOCKS))
            taken |= {name, name.removesuffix(BLOCKS) + SCALES}
        elif part in CODES and (part != "weight" or _is_quantized(tensors, module)):
            scheme = quantization.scheme_of(module)
            if scheme is None:
                raise WeightMismatch(
                    f"{tensors[name].path} holds {name!r} quantized, and no group of quantization_config in "
                    "config.json is about it"
                )
            weights[f"{module}.weight"] = OPENERS[scheme.layout](Parts(tensors, module), scheme)
            taken |= {f"{module}.{each}" for each in (part, *BESIDE)}
        elif PASSED_OVER.fullmatch(part):
            taken.add(name)
    return weights | {name: tensor for name, tensor in tensors.items() if name not in taken}


def _is_quantized(tensors: Mapping[str, CheckpointTensor], module: str) -> bool:
    """Whether a module's tensor `weight` is quantized: its dtype is a dtype of codes, or the files hold its scales."""
    if tensors[f"{module}.weight"].dtype in ONE_BYTE:
        return True
    beside = ("weight_scale", "weight_scale_inv", *FOUR_BIT_PARTS)
    return any(f"{module}.{part}" in tensors for part in beside)


def _open_plain(parts: Parts, scheme: Scheme) -> CheckpointTensor:
    codes = parts.matrix("weight", PLAIN_DTYPES[scheme.kind])
    rows, columns = count_scales(codes.shape, scheme.block)
    shapes: list[tuple[int, ...]] = [(rows, columns)]
    if columns == 1:
        shapes.append((rows,))
    if rows == columns == 1:
        shapes.append(())
    scale_name = "weight_scale_inv" if parts.holds("weight_scale_inv") else scheme.scale_name
    scale_dtypes = FLOATS if scheme.kind == "int" else (*FLOATS, "F8_E8M0")
    scale = parts.get(scale_name, scale_dtypes, *shapes)
    has_zero_points = scheme.zero_points or parts.holds("weight_zero_point")
    zero_points = parts.get("weight_zero_point", ("I8",), *shapes) if has_zero_points else 0
    return QuantizedTensor(codes.name, codes, scheme.block, scale, zero_points=zero_points)


def _open_packed(parts: Parts, scheme: Scheme) -> CheckpointTensor:
    """Open compressed-tensors' words. A word holds neighbours of one row, each with 2^(bits - 1) added."""
    shape = parts.get("weight_shape", ("I64", "I32"), (2,))
    rows, columns = shape.whole().tolist()
    size = 32 // scheme.bits
    words = parts.matrix("weight_packed", "I32")
    if words.shape != (rows, -(-columns // size)):
        raise damaged(
            shape, f"is {[rows, columns]}, which does not fit words of shape {list(words.shape)}"
        )
    num_scales = count_scales((rows, columns), scheme.block)
    zero_points: Codes | int = 1 << (scheme.bits - 1)
    if scheme.zero_points or parts.holds("weight_zero_point"):
        stored = parts.get(
            "weight_zero_point", ("I32",), (-(-num_scales[0] // size), num_scales[1])
        )
        zero_points = PackedIntegers(stored, num_scales, scheme.bits, dim=0)
    return QuantizedTensor(
        f"{parts.module}.weight",
        PackedIntegers(words, (rows, columns), scheme.bits, dim=1),
        scheme.block,
        parts.get("weight_scale", FLOATS, num_scales),
        zero_points=zero_points,
        group_of_column=_group_of_column(parts, "weight_g_idx", columns, scheme),
    )


def _open_transposed(parts: Parts, scheme: Scheme) -> CheckpointTensor:
    """Open a weight that is stored as its transpose, [in, out].

    A word holds 8 columns of the transpose in AWQ, and 8 or 4 of its rows in GPTQ.
    """
    words = parts.matrix("qweight", "I32")
    size = 32 // scheme.bits
    is_awq = scheme.layout == "awq"
    dim = 1 if is_awq else 0
    columns, rows = words.shape
    if is_awq:
        rows *= size
    else:
        columns *= size
    num_scales = count_scales((rows, columns), scheme.block)
    zero_points = parts.get("qzeros", ("I32",), (num_scales[1], rows // size))
    return QuantizedTensor(
        f"{parts.module}.weight",
        PackedIntegers(
            words, (rows, columns), scheme.bits, dim=dim, transposed=True, interleaved=is_awq
        ),
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


def _group_of_column(
    parts: Parts, part: str, columns: int, scheme: Scheme
) -> CheckpointTensor | None:
    """Return the tensor that says which scale each column has; None if a group's columns are adjacent."""
    if not scheme.column_groups and not parts.holds(part):
        return None
    found = parts.get(part, ("I32", "I64"), (columns,))
    in_order = torch.arange(columns) // (scheme.block[1] or columns)
    if torch.equal(found.whole().long(), in_order):
        return None  # GPTQ's files hold this tensor even if the columns are in order
    return found


def _open_mxfp4(tensors: Mapping[str, CheckpointTensor], name: str) -> CheckpointTensor:
    module, _, last = name.rpartition(".")
    parts = Parts(tensors, module)
    blocks = parts.get(last + BLOCKS, ("U8",))
    if len(blocks.shape) != 4 or blocks.shape[3] != 16:
        raise WeightMismatch(
            f"{blocks.name!r} in {blocks.path} has shape {list(blocks.shape)}, [experts, out, in / 32, 16] expected"
        )
    return Mxfp4Tensor(name, blocks, parts.get(last + SCALES, ("U8",), blocks.shape[:3]))


def _open_four_bits(parts: Parts, scheme: Scheme) -> CheckpointTensor:
    """Open a bitsandbytes weight of four bits. The files say whether it is nf4 or fp4, and the size of its blocks."""
    codes, scales = open_four_bits(parts)
    return QuantizedTensor(f"{parts.module}.weight", codes, (1, scales.group), scales)


def _open_int8_rows(parts: Parts, scheme: Scheme) -> CheckpointTensor:
    """Open a bitsandbytes int8 weight, with a scale for each row."""
    codes = parts.matrix("weight", "I8")
    scales = open_row_scales(parts, codes.shape[0])
    return QuantizedTensor(codes.name, codes, scheme.block, scales)


OPENERS: dict[str, Callable[[Parts, Scheme], CheckpointTensor]] = {
    "plain": _open_plain,
    "packed": _open_packed,
    "awq": _open_transposed,
    "gptq": _open_transposed,
    "bitsandbytes4": _open_four_bits,
    "bitsandbytes8": _open_int8_rows,
}
