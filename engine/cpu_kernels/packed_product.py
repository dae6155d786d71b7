"""Products with weights in 4 or 8 bits: a block is unpacked into the cache and multiplied there with all rows."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from engine.cpu_kernels.kernel import ELEMENTS, Kernel, next_task, worker_number
from engine.cpu_kernels.scalars import (
    F32,
    FLOAT32,
    FLOAT_BYTES,
    I8,
    I16,
    I32,
    I64,
    narrow,
    pointer_to,
    row_pointer,
    wide,
)
from engine.cpu_kernels.vectors import FEATURES, LONGEST_VECTOR, Emitter
from engine.kernels.products.codes import BITS, INTEGERS, NUMBERS

LANES = LONGEST_VECTOR  # output features of a vector
VECTORS = 4  # of output features of a tile; with ROWS of sums they fill the registers
TILE = LANES * VECTORS
ROWS = 6  # rows that meet a vector of weights at once
CHUNK = 32 * ROWS  # rows of a task: their sums stay in the second cache
MOST_COLUMNS = 128  # input features of a block: it stays in the first cache
VECTOR_BYTES = LANES * FLOAT_BYTES
LEAST_COLUMNS = 16
HAS_LONG_VECTORS = "+avx512f" in FEATURES  # else the sums do not fit into the registers
LOOKS_UP_WORDS = "+avx512bw" in FEATURES  # 32 words of 16 bits by their index, in one instruction
LOOK_UP_WORDS = "llvm.x86.avx512.permvar.hi.512"
LOOK_UP_FLOATS = "llvm.x86.avx512.permvar.sf.512"  # 16 of them

#: A half that has the bits of an fp8 is smaller by a factor, as its exponent has another bias.
FP8_MANTISSA_BITS, FP8_FACTOR = 3, 2.0**8
#: Scales may be in these dtypes.
SCALES = {torch.float32: "float", torch.float16: "half", torch.bfloat16: "bfloat16"}


def block(kind: str, group: int) -> int | None:
    """Return how many columns are unpacked together, a divisor of the group; None if the kernel would be slow."""
    if not HAS_LONG_VECTORS:
        return None
    per_word = 32 // BITS[kind]
    sizes = range(MOST_COLUMNS, LEAST_COLUMNS - 1, -per_word)
    return next((size for size in sizes if group % size == 0), None)


def lay_out(words: Tensor, scales: Tensor, zeros: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Lay a weight out by tiles of output features; zeros fill the last tile. See PackedKernels."""
    num_tiles = -(-len(words) // TILE)
    added = num_tiles * TILE - len(words)
    tiles = F.pad(words, (0, 0, 0, 0, 0, added)).view(num_tiles, TILE, -1, 4)
    by_group = [F.pad(each, (0, 0, 0, added)).t().contiguous() for each in (scales, zeros)]
    return tiles.transpose(1, 2).contiguous(), by_group[0], by_group[1]


def multiply(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor,
    bias: Tensor | None,
    out_features: int,
    block: int,
    kind: str,
) -> Tensor:
    """Return x W^T + b for a weight as engine.layers.packed lays it out. x: [rows, in] -> [rows, out].

    block: columns that are unpacked together, which share a scale.
    """
    num_rows, in_features = x.shape
    out = x.new_empty(num_rows, out_features)
    if not num_rows:
        return out
    if x.stride(1) != 1:
        x = x.contiguous()
    rows = min(num_rows, CHUNK)
    block_bytes = block * TILE * x.element_size()
    scratch = torch.empty(
        torch.get_num_threads(), block_bytes + rows * TILE * FLOAT_BYTES, dtype=torch.uint8
    )
    num_tiles = -(-out_features // TILE)
    num_chunks = -(-num_rows // CHUNK)
    kernel = _kernel(kind, x.dtype, scales.dtype)
    kernel(
        num_tiles * num_chunks, num_rows, x, x.stride(0), codes, scales, zeros,
        0 if bias is None else bias, out, out_features, in_features, block,
        in_features // len(scales) // block, num_tiles, scratch, scratch.shape[1], block_bytes,
    )  # fmt: skip
    return out


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def _unpack_block(
    typing: Any, codes: Any, zeros: Any, target: Any, num_words: Any, kind: Any, element: Any
) -> Any:
    """Unpack `num_words` words of each output feature of a tile into pairs of bfloat16, or into float32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit = _Unpacker(builder, kind.literal_value, element.dtype)
        code, zero, target, words = args[:4]
        subtracted = [emit.load_zeros(zero, v) for v in range(VECTORS)]
        with cgutils.for_range(builder, words) as loop:
            here = builder.add(code, builder.mul(loop.index, I64(VECTORS * VECTOR_BYTES)))
            size = emit.steps * VECTORS * VECTOR_BYTES
            there = builder.add(target, builder.mul(loop.index, I64(size)))
            for v in range(VECTORS):
                for step, vector in enumerate(emit.unpack(here, v, subtracted[v])):
                    emit.store(vector, there, (step * VECTORS + v) * VECTOR_BYTES)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4, kind, element), generate


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def _add_products(
    typing: Any, x: Any, row_bytes: Any, weights: Any, zeros: Any, steps: Any, scales: Any, sums: Any,
    num_rows: Any, kind: Any, scale_kind: Any, element: Any,
) -> Any:  # fmt: skip
    """sums[row] += scales * (x[row] . weights) for 1 to ROWS rows and a tile of output features.

    weights: if kind is "", already unpacked by `_unpack_block`; otherwise codes of that kind, which are unpacked here.
    steps: how many unpacked vectors or words of codes there are for each output feature.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        name, scale = kind.literal_value, scale_kind.literal_value
        done = builder.append_basic_block("done")
        cases = builder.switch(args[7], done)
        for rows in range(1, ROWS + 1):
            case = builder.append_basic_block(f"rows{rows}")
            cases.add_case(I64(rows), case)
            with builder.goto_block(case):
                _emit_products(builder, args, rows, name, scale, element.dtype)
                builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 8, kind, scale_kind, element), generate


def _emit_products(
    builder: Any, args: Any, num_rows: int, kind: str, scale_kind: str, element: Any
) -> None:
    """Emit the code of `_add_products` for this number of rows. Their sums stay in registers."""
    emit = _Unpacker(builder, kind or "int8", element)
    x, row_bytes, weight, zero, steps, scale, total = args[:7]
    slots = [
        [cgutils.alloca_once_value(builder, emit.zero()) for _ in range(VECTORS)]
        for _ in range(num_rows)
    ]
    for row in slots:
        for slot in row:
            builder.store(emit.zero(), slot)
    subtracted = [emit.load_zeros(zero, v) for v in range(VECTORS)] if kind else []
    num_factors = emit.steps if kind else 1
    factor_kind = F32 if element == FLOAT32 else I32
    with cgutils.for_range(builder, steps) as loop:
        here = builder.add(weight, builder.mul(loop.index, I64(VECTORS * VECTOR_BYTES)))
        place = builder.add(x, builder.mul(loop.index, I64(num_factors * FLOAT_BYTES)))
        if kind:
            vectors = [emit.unpack(here, v, subtracted[v]) for v in range(VECTORS)]
        else:
            vectors = [[emit.load_step(here, v)] for v in range(VECTORS)]
        for step in range(num_factors):
            for r in range(num_rows):
                address = builder.add(place, builder.mul(I64(r), row_bytes))
                address = builder.add(address, I64(step * FLOAT_BYTES))
                loaded = builder.load(builder.inttoptr(address, factor_kind.as_pointer()))
                loaded.align = element.bitwidth // 8
                factor = emit.splat(loaded)
                for v in range(VECTORS):
                    slot = slots[r][v]
                    builder.store(emit.add(factor, vectors[v][step], builder.load(slot)), slot)
    by = [emit.load_scales(scale, v, scale_kind) for v in range(VECTORS)]
    for r in range(num_rows):
        for v in range(VECTORS):
            at = (r * VECTORS + v) * VECTOR_BYTES
            before = emit.load(total, at)
            emit.store(emit.multiply_add(builder.load(slots[r][v]), by[v], before), total, at)


class _Unpacker(Emitter):
    """Emits vectors of the weights that codes stand for. A vector has one input feature, or two if they are bfloat16.

    A word of four bytes holds the codes of adjacent input features for one output feature, see engine.layers.packed.
    """

    def __init__(self, builder: Any, kind: str, element: Any) -> None:
        super().__init__(builder, LANES, FLOAT32)
        self._builder: Any = builder
        self._kind = kind
        self._pairs = element != FLOAT32
        self._bits = BITS[kind]
        self.steps = 32 // self._bits // (2 if self._pairs else 1)
        self._lanes = ir.VectorType(I32, LANES)
        self._floats = ir.VectorType(F32, LANES)

    def load_step(self, address: Any, vector: int) -> Any:
        at = vector * VECTOR_BYTES
        return self.load_pairs(address, at) if self._pairs else self.load(address, at)

    def add(self, factor: Any, weights: Any, total: Any) -> Any:
        add = self.add_dot if self._pairs else self.multiply_add
        return add(factor, weights, total)

    def load_zeros(self, address: Any, vector: int) -> Any:
        """Load a tile's zero points as `unpack` needs them."""
        if self._kind not in INTEGERS:
            return None
        stored = ir.VectorType(I8, LANES)
        loaded = self._builder.load(self._pointer(address, vector * LANES, stored))
        loaded.align = 1
        zeros = self._builder.zext(loaded, self._lanes)
        if not self._looks_up():
            return zeros
        # 16 - zero point in each of a word's four bytes, for `_look_up_int4`
        sixteen = self._builder.sub(self._all(16), zeros)
        return self._builder.mul(sixteen, self._all(0x01010101))

    def load_scales(self, address: Any, vector: int, kind: str) -> Any:
        """Load a tile's scales, as float32."""
        if kind == "float":
            return self.load(address, vector * VECTOR_BYTES)
        number = ir.HalfType() if kind == "half" else I16
        pointer = self._pointer(address, vector * LANES * 2, ir.VectorType(number, LANES))
        loaded = self._builder.load(pointer)
        loaded.align = 2
        if kind == "half":
            return self._builder.fpext(loaded, self._floats)
        wide_bits = self._builder.zext(loaded, self._lanes)
        return self._builder.bitcast(self._builder.shl(wide_bits, self._all(16)), self._floats)

    def unpack(self, address: Any, vector: int, zeros: Any) -> list[Any]:
        """Load one word of each output feature, and return the weights in the words, not yet multiplied by scales."""
        words = self.load_pairs(address, vector * VECTOR_BYTES)
        if self._looks_up():
            if self._kind == "int4":
                return self._look_up_int4(words, zeros)
            if self._kind == "fp8":
                return self._look_up_fp8(words)
            return self._look_up_numbers(words)
        # codes of adjacent input features alternate between the halves of a word
        numbers = [
            self._number(words, half + self._bits * step, zeros)
            for step in range(16 // self._bits)
            for half in (0, 16)
        ]
        if not self._pairs:
            return numbers
        return [self._cut(*numbers[i : i + 2]) for i in range(0, len(numbers), 2)]

    def _looks_up(self) -> bool:
        return self._kind != "int8" and self._pairs and LOOKS_UP_WORDS

    def _look_up_int4(self, words: Any, sixteen_less_zeros: Any) -> list[Any]:
        """Look up each code - zero point in a table of the numbers -16 to 15, at index code + 16 - zero point."""
        builder = self._builder
        low = self._all(0x0F0F0F0F)
        places = [
            builder.add(builder.and_(each, low), sixteen_less_zeros)
            for each in (words, builder.lshr(words, self._all(4)))
        ]
        places += [builder.lshr(each, self._all(8)) for each in places]
        return [self._look_up(range(-16, 16), each) for each in places]

    def _look_up_numbers(self, words: Any) -> list[Any]:
        """Look up each code's number. The table has them twice, as the fifth bit of a place belongs to another code."""
        shifted = [self._builder.lshr(words, self._all(shift)) for shift in (0, 4, 8, 12)]
        return [self._look_up(NUMBERS[self._kind] * 2, each) for each in shifted]

    def _look_up_fp8(self, words: Any) -> list[Any]:
        """Turn e4m3 into bfloat16: its bits are shifted, and the bias corrected. Numbers below 2^-6 are looked up."""
        builder = self._builder
        vectors = []
        for each in (words, builder.lshr(words, self._all(8))):
            magnitudes = builder.and_(each, self._all(0x007F007F))
            moved = builder.add(builder.shl(magnitudes, self._all(4)), self._all(0x3C003C00))
            small = self._look_up([i / 512 for i in range(8)] * 4, magnitudes)
            words16 = ir.VectorType(I16, 2 * LANES)
            exponents = builder.and_(builder.bitcast(each, words16), words16([0x78] * 2 * LANES))
            is_small = builder.icmp_unsigned("==", exponents, words16([0] * 2 * LANES))
            chosen = builder.select(
                is_small, builder.bitcast(small, words16), builder.bitcast(moved, words16)
            )
            signs = builder.shl(builder.and_(each, self._all(0x00800080)), self._all(8))
            vectors.append(builder.or_(builder.bitcast(chosen, self._lanes), signs))
        return vectors

    def _look_up(self, numbers: Any, places: Any) -> Any:
        """Look up a bfloat16 for each place of 16 bits; its five lowest bits count."""
        words16 = ir.VectorType(I16, 2 * LANES)
        bits = torch.tensor(list(numbers), dtype=torch.bfloat16).view(torch.int16).tolist()
        kind = ir.FunctionType(words16, [words16, words16])
        function = cgutils.get_or_insert_function(self._builder.module, kind, LOOK_UP_WORDS)
        found = self._builder.call(
            function, (words16(bits), self._builder.bitcast(places, words16))
        )
        return self._builder.bitcast(found, self._lanes)

    def _look_up_floats(self, places: Any) -> Any:
        """Look up the number at each place; a place's four lowest bits count. Pairs get numbers rounded to bfloat16."""
        dtype = torch.bfloat16 if self._pairs else torch.float32
        numbers = torch.tensor(NUMBERS[self._kind], dtype=dtype).tolist()
        kind = ir.FunctionType(self._floats, [self._floats, self._lanes])
        function = cgutils.get_or_insert_function(self._builder.module, kind, LOOK_UP_FLOATS)
        return self._builder.call(function, (self._floats(numbers), places))

    def _number(self, words: Any, shift: int, zeros: Any) -> Any:
        """Return as float32 the numbers that the words' codes from bit `shift` on stand for."""
        builder = self._builder
        shifted = builder.lshr(words, self._all(shift))
        if self._kind in NUMBERS:
            return self._look_up_floats(shifted)
        codes = builder.and_(shifted, self._all((1 << self._bits) - 1))
        if self._kind in INTEGERS:
            return builder.sitofp(builder.sub(codes, zeros), self._floats)
        # fp8: its bits are moved to where float16 has sign, exponent and mantissa
        sign = builder.shl(builder.and_(codes, self._all(0x80)), self._all(8))
        magnitude = builder.and_(codes, self._all(0x7F))
        rest = builder.shl(magnitude, self._all(10 - FP8_MANTISSA_BITS))
        bits = builder.trunc(builder.or_(sign, rest), ir.VectorType(I16, LANES))
        halves = builder.bitcast(bits, ir.VectorType(ir.HalfType(), LANES))
        factors = self._floats([FP8_FACTOR] * LANES)
        return builder.fmul(builder.fpext(halves, self._floats), factors)

    def _cut(self, low: Any, high: Any) -> Any:
        """Return pairs of bfloat16, which hold these numbers exactly."""
        builder = self._builder
        low, high = (builder.bitcast(each, self._lanes) for each in (low, high))
        return builder.or_(
            builder.lshr(low, self._all(16)), builder.and_(high, self._all(-0x10000))
        )

    def _all(self, number: int) -> Any:
        return self._lanes([number] * LANES)


@cache
def _kernel(kind: str, dtype: torch.dtype, scale_dtype: torch.dtype) -> Kernel:
    element = ELEMENTS[dtype]
    scale_kind = SCALES[scale_dtype]
    element_bytes = dtype.itemsize
    scale_bytes = scale_dtype.itemsize
    per_word = 32 // BITS[kind]
    factors = 1 if dtype == torch.float32 else 2
    zero_bytes = 1 if kind in INTEGERS else 0

    def multiply_tiles(parameters: Any) -> None:
        num_rows, x, row_step = parameters[3], parameters[4], parameters[5] * element_bytes
        codes, scales, zeros, bias = parameters[6], parameters[7], parameters[8], parameters[9]
        out, out_features, in_features = parameters[10], parameters[11], parameters[12]
        block, blocks_a_group, num_tiles = parameters[13], parameters[14], parameters[15]
        num_blocks = in_features // block
        width = num_tiles * TILE
        task, scratch = next_task(parameters), parameters[16]
        if task >= 0:
            scratch += worker_number(parameters) * parameters[17]
        sums = scratch + parameters[18]
        words, steps = block // per_word, block // factors
        while task >= 0:
            tile, first = task % num_tiles, task // num_tiles * CHUNK
            rows = min(num_rows - first, CHUNK)
            columns = min(out_features - tile * TILE, TILE)
            # each row's sums begin with the bias
            totals = carray(pointer_to(sums, FLOAT32), (rows, TILE))
            for n in range(TILE):
                added = FLOAT32(0)
                if bias != 0 and n < columns:
                    added = wide(pointer_to(bias, element)[tile * TILE + n])
                totals[0, n] = added
            for r in range(1, rows):
                for n in range(TILE):
                    totals[r, n] = totals[0, n]
            for number in range(num_blocks):
                group = number // blocks_a_group
                code = codes + (tile * num_blocks + number) * words * (TILE * FLOAT_BYTES)
                scale = scales + (group * width + tile * TILE) * scale_bytes
                zero = zeros + (group * width + tile * TILE) * zero_bytes
                row = x + first * row_step + number * block * element_bytes
                # few rows: codes are unpacked in registers.  more rows: they are unpacked once, into the cache
                if rows <= ROWS:
                    _add_products(
                        row, row_step, code, zero, words, scale, sums, rows,
                        kind, scale_kind, element,
                    )  # fmt: skip
                else:
                    _unpack_block(code, zero, scratch, words, kind, element)
                    for done in range(0, rows, ROWS):
                        _add_products(
                            row + done * row_step, row_step, scratch, zero, steps, scale,
                            sums + done * (TILE * FLOAT_BYTES), min(ROWS, rows - done),
                            "", scale_kind, element,
                        )  # fmt: skip
            for r in range(rows):
                place = row_pointer(out, first + r, out_features, element)
                written = carray(place, (out_features,))[tile * TILE : tile * TILE + columns]
                for n in range(columns):
                    written[n] = narrow(totals[r, n], element)
            task = next_task(parameters)

    return Kernel(multiply_tiles)
