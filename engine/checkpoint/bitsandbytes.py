"""Weights as bitsandbytes stores them: codes of four bits whose blocks share a scale, and rows in int8 (LLM.int8)."""

import json
from dataclasses import dataclass
from math import gcd, prod

import torch
from torch import Tensor

from engine.checkpoint.packed_form import damaged
from engine.checkpoint.parts import FLOATS, Parts
from engine.checkpoint.weights import CheckpointTensor
from engine.errors import UnsupportedModel, WeightMismatch
from engine.kernels.products.codes import NUMBERS

#: The kinds in which four bits stay packed, by bitsandbytes' quant_type.
KINDS = {"nf4": "nf4", "fp4": "bnb_fp4"}
#: The tensor that says how a module is quantized, by quant_type.
STATES = {quant_type: f"weight.quant_state.bitsandbytes__{quant_type}" for quant_type in KINDS}
FOUR_BIT_PARTS = (
    *("weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map"),
    *STATES.values(),
)
INT8_PARTS = ("SCB", "weight_format")
#: Bytes of the dtypes in which packed codes may be stored: all of them are views of the same bytes.
STORAGE_BYTES = {"U8": 1, "I8": 1, "F16": 2, "BF16": 2, "F32": 4, "F64": 8}
ROW_MAJOR = 0  # of weight_format; older versions stored int8 as a GPU's tiles too
LARGEST_INT8 = 127
MOST_NUMBERS = 1 << 62  # more than any tensor has
MAP_TOLERANCE = 1e-4  # versions have computed the numbers of nf4 in more than one way


@dataclass(frozen=True)
class Nesting:
    """How the largest magnitudes of a weight's blocks are themselves quantized.

    block: the number of magnitudes that share a scale. offset: a number that is added to each magnitude.
    """

    block: int
    offset: float


@dataclass(frozen=True)
class QuantState:
    """A file's description of a module's four-bit weight.

    shape: (out, in). block: how many numbers share a scale, counted row after row.
    nesting: None if the magnitudes of blocks are stored as plain numbers.
    """

    shape: tuple[int, int]
    block: int
    nesting: Nesting | None


class FourBitCodes:
    """A matrix of codes, row after row. A byte holds two codes, the first one in its upper half.

    kind: a key of NUMBERS.
    """

    def __init__(self, stored: CheckpointTensor, shape: tuple[int, int], kind: str) -> None:
        self.path = stored.path
        self.shape = shape
        self.kind = kind
        self._stored = stored

    def part(self, *ranges: slice) -> Tensor:
        """Return these rows and columns, uint8; all of them without a range."""
        stored = self._stored.whole().flatten().view(torch.uint8)
        codes = torch.stack((stored >> 4, stored & 15), -1).flatten()
        rows, columns = self.shape
        return codes[: rows * columns].view(self.shape)[ranges]


class NestedMagnitudes(CheckpointTensor):
    """The largest magnitude of each block of a weight, [blocks] float32. The file holds them as codes.

    scales: one for each block of codes. numbers: the number that each code stands for.
    """

    def __init__(
        self,
        codes: CheckpointTensor,
        scales: CheckpointTensor,
        numbers: CheckpointTensor,
        nesting: Nesting,
    ) -> None:
        self.name = codes.name
        self.path = codes.path
        self.dtype = "F32"
        self.shape = codes.shape
        self._codes = codes
        self._scales = scales
        self._numbers = numbers
        self._nesting = nesting

    def part(self, *ranges: slice) -> Tensor:
        """Unpack these magnitudes, on the CPU."""
        codes = self._codes.whole().int()
        scales = self._scales.whole()[torch.arange(len(codes)) // self._nesting.block]
        magnitudes = self._numbers.whole()[codes] * scales + self._nesting.offset
        return magnitudes[ranges]


class BlockScales(CheckpointTensor):
    """The scales of a matrix's groups of columns, [rows, groups] float32.

    A block may begin in one row and end in the next. A group is the largest number of columns for which each group of
    a row lies in a single block.
    magnitudes: the largest magnitude of each block. largest: the largest number that a code stands for.
    """

    def __init__(self, magnitudes: CheckpointTensor, state: QuantState, largest: float) -> None:
        rows, columns = state.shape
        self.group = gcd(columns, state.block)
        self.name = magnitudes.name
        self.path = magnitudes.path
        self.dtype = "F32"
        self.shape = (rows, columns // self.group)
        self._magnitudes = magnitudes
        self._block = state.block
        self._largest = largest

    def part(self, *ranges: slice) -> Tensor:
        """Read these rows and groups, on the CPU."""
        rows, groups = self.shape
        first_numbers = torch.arange(rows * groups) * self.group
        scales = self._magnitudes.whole()[first_numbers // self._block] / self._largest
        return scales.view(self.shape)[ranges]


class RowScales(CheckpointTensor):
    """The scales of int8 rows, [rows] float32. The file holds 127 times each scale."""

    def __init__(self, stored: CheckpointTensor) -> None:
        self.name = stored.name
        self.path = stored.path
        self.dtype = "F32"
        self.shape = stored.shape
        self._stored = stored

    def part(self, *ranges: slice) -> Tensor:
        """Read these rows, on the CPU."""
        return self._stored.part(*ranges).float() / LARGEST_INT8


def open_four_bits(parts: Parts) -> tuple[FourBitCodes, BlockScales]:
    """Open the codes of a module's weight, and their scales.

    Raises MissingWeights or WeightMismatch as `get` of Parts does, and DamagedWeights if the stored description of the
    weight is damaged or holds other numbers than nf4's or fp4's.
    """
    quant_type = "fp4" if parts.holds(STATES["fp4"]) else "nf4"
    state = _read_state(parts.get(STATES[quant_type], ("U8",)), quant_type)
    rows, columns = state.shape
    stored = parts.get("weight", tuple(STORAGE_BYTES))
    num_bytes = prod(stored.shape) * STORAGE_BYTES[stored.dtype]
    expected_bytes = -(-rows * columns // 2)
    if num_bytes != expected_bytes:
        raise WeightMismatch(
            f"{stored.name!r} in {stored.path} has {num_bytes} bytes, {expected_bytes} expected: its quant_state "
            f"says {rows} x {columns} numbers of four bits"
        )
    numbers = NUMBERS[KINDS[quant_type]]
    largest = max(numbers)
    stored_numbers = parts.get("weight.quant_map", ("F32",), (len(numbers),))
    expected = torch.tensor(numbers) / largest
    if not torch.allclose(stored_numbers.whole(), expected, rtol=0, atol=MAP_TOLERANCE):
        raise damaged(stored_numbers, f"holds other numbers than those of {quant_type}")
    codes = FourBitCodes(stored, state.shape, KINDS[quant_type])
    return codes, BlockScales(_open_magnitudes(parts, state), state, largest)


def _open_magnitudes(parts: Parts, state: QuantState) -> CheckpointTensor:
    """Open the largest magnitude of each block: float32 numbers, or 8-bit codes with scales and a table."""
    num_blocks = -(-prod(state.shape) // state.block)
    nesting = state.nesting
    if nesting is None:
        return parts.get("weight.absmax", ("F32",), (num_blocks,))
    return NestedMagnitudes(
        parts.get("weight.absmax", ("U8",), (num_blocks,)),
        parts.get("weight.nested_absmax", ("F32",), (-(-num_blocks // nesting.block),)),
        parts.get("weight.nested_quant_map", ("F32",), (256,)),
        nesting,
    )


def open_row_scales(parts: Parts, num_rows: int) -> RowScales:
    """Open the scales of a module's int8 weight. Raises UnsupportedModel if the weight is not stored row by row."""
    if parts.holds("weight_format"):
        tensor = parts.get("weight_format", ("U8",), ())
        weight_format = int(tensor.whole())
        if weight_format != ROW_MAJOR:
            raise UnsupportedModel(
                f"{tensor.name!r} in {tensor.path} is {weight_format}, {ROW_MAJOR} expected (rows): int8 in a "
                "GPU's tiles is not supported; save the model again with a newer bitsandbytes"
            )
    return RowScales(parts.get("SCB", FLOATS, (num_rows,)))


def _read_state(tensor: CheckpointTensor, quant_type: str) -> QuantState:
    """Read a module's quant_state, a JSON object whose bytes are a tensor.

    Raises DamagedWeights if it does not describe a weight of this quant_type.
    """
    try:
        values = json.loads(bytes(tensor.whole().tolist()))
        rows, columns = values["shape"]
        sizes = [rows, columns, values["blocksize"]]
        nesting = None
        if "nested_blocksize" in values:
            nesting = Nesting(values["nested_blocksize"], float(values["nested_offset"]))
            sizes.append(nesting.block)
        if any(type(size) is not int or not 0 < size < MOST_NUMBERS for size in sizes):
            raise ValueError("sizes are no positive integers")
        if values["quant_type"] != quant_type:
            raise ValueError(f"quant_type is {values['quant_type']!r}")
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise damaged(tensor, f"describes no matrix in {quant_type} ({error!r})") from error
    return QuantState((rows, columns), values["blocksize"], nesting)
