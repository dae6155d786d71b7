"""The inner loops of attention as LLVM vector code, which keeps sums in registers: 1.5 to 2 times faster."""

import functools
from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.codegen import get_host_cpu_features
from numba.extending import intrinsic

from engine.cpu_kernels.scalars import F32, FLOAT32, FLOAT_BYTES, I16, I32, I64, widen
from engine.cpu_kernels.softmax import LEAST, emit_exp

CACHE_LINE = 64
LONGEST_VECTOR = 16  # floats: 64 bytes, one AVX-512 register; LLVM splits it where there is none
FEATURES = (
    get_host_cpu_features() if numba.config.CPU_FEATURES is None else numba.config.CPU_FEATURES
)
DOT_PAIRS = "llvm.x86.avx512bf16.dpbf16ps.512" if "+avx512bf16" in FEATURES else None
ACCUMULATORS = 16  # vectors kept in registers, of the 32 (AVX-512) or 16 there are


def rows_at_once(group: int, head_dim: int) -> int:
    """Return how many of a group's heads share one load of a key or value: a divisor of the group."""
    most = max(1, ACCUMULATORS // (head_dim // _vector_length(head_dim)))
    return next(rows for rows in range(min(group, most), 0, -1) if group % rows == 0)


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def score_tokens(
    typing: Any, queries: Any, keys: Any, key_stride: Any, num_tokens: Any, ahead: Any, scores: Any,
    score_stride: Any, rows: Any, head_dim: Any, element: Any,
) -> Any:  # fmt: skip
    """scores[row, token] = queries[row] . keys[token] for `rows` adjacent rows of `head_dim` numbers.

    Strides are in bytes, between two keys and between two rows of scores. rows and head_dim are literals,
    element is the type of queries and keys; scores are float32. ahead: the keys or values to prefetch meanwhile.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit = Emitter(builder, head_dim.literal_value, element.dtype)
        query, key, key_step, tokens, ahead, score, score_step = args[:7]
        held = [
            [
                emit.load(query, emit.row_bytes * r + emit.vector_bytes * i)
                for i in range(emit.num_vectors)
            ]
            for r in range(rows.literal_value)
        ]

        def products(token: Any) -> list[Any]:
            here = builder.add(key, builder.mul(token, key_step))
            emit.prefetch(builder.add(ahead, builder.mul(token, I64(emit.row_bytes))))
            loaded = [emit.load(here, emit.vector_bytes * i) for i in range(emit.num_vectors)]
            return [
                functools.reduce(emit.add_product, zip(row, loaded, strict=True), None)
                for row in held
            ]

        def store(first: Any, sums: list[Any]) -> None:
            for r, total in enumerate(sums):
                place = builder.add(score, builder.mul(I64(r), score_step))
                place = builder.add(place, builder.mul(first, I64(FLOAT_BYTES)))
                builder.store(
                    total, builder.inttoptr(place, total.type.as_pointer())
                ).align = FLOAT_BYTES

        done = I64(0)
        if emit.sums_four:
            done = builder.and_(tokens, I64(-4))
            with cgutils.for_range(builder, builder.udiv(tokens, I64(4))) as loop:
                first = builder.mul(loop.index, I64(4))
                each = [products(builder.add(first, I64(i))) for i in range(4)]
                store(first, [emit.sum_four(row) for row in zip(*each, strict=True)])
        with cgutils.for_range(builder, tokens, start=done) as loop:
            store(loop.index, [emit.sum(total) for total in products(loop.index)])
        return context.get_dummy_value()

    return _void(7, rows, head_dim, element), generate


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def add_weighted(
    typing: Any, weights: Any, weight_stride: Any, values: Any, value_stride: Any, num_tokens: Any,
    ahead: Any, outputs: Any, rows: Any, head_dim: Any, element: Any,
) -> Any:  # fmt: skip
    """outputs[row] += sum over tokens of weights[row, token] * values[token].

    Strides are in bytes, between two rows of weights and between two values; the outputs' rows are adjacent.
    rows and head_dim are literals, element is the type of values; weights and outputs are float32. ahead: the keys or
    values to prefetch meanwhile.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit = Emitter(builder, head_dim.literal_value, element.dtype)
        weight, weight_step, value, value_step, tokens, ahead, output = args[:7]
        sums = Emitter(builder, head_dim.literal_value, FLOAT32)

        def load(token: Any) -> list[Any]:
            here = builder.add(value, builder.mul(token, value_step))
            emit.prefetch(builder.add(ahead, builder.mul(token, I64(emit.row_bytes))))
            return [emit.load(here, emit.vector_bytes * i) for i in range(emit.num_vectors)]

        factors = weight, weight_step, I64(FLOAT_BYTES)
        sums.accumulate(
            output, rows.literal_value, tokens, load, factors, lambda at, _: sums.load(output, at)
        )
        return context.get_dummy_value()

    return _void(7, rows, head_dim, element), generate


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def add_outer_products(
    typing: Any, factors: Any, row_stride: Any, step: Any, vectors: Any, sums: Any, num_steps: Any, by: Any,
    adds: Any, rows: Any, num_vectors: Any, element: Any,
) -> Any:  # fmt: skip
    """sums[row] = the sum over k of factors[row * row_stride + k * step] * vectors[k], for `rows` rows.

    sums and vectors have rows of `num_vectors` vectors of LONGEST_VECTOR words, one after the other; strides are in
    bytes. Words are float32; those of factors and vectors may be pairs of bfloat16, whose products are both added.
    by: a row of float32 factors. With `adds`, they multiply the old sums, and the result is added to those; otherwise
    they multiply the result, which replaces the old sums.
    adds, rows, num_vectors: literals.  element: the type of factors and vectors.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit = Emitter(builder, num_vectors.literal_value * LONGEST_VECTOR, FLOAT32)
        factor, row_step, k_step, vector, total, steps, by = args[:7]
        offsets = [emit.vector_bytes * i for i in range(num_vectors.literal_value)]
        adds_up, pairs = bool(adds.literal_value), element.dtype != FLOAT32
        scales = [emit.load(by, at) for at in offsets]

        def before(at: int, vector: int) -> Any:
            return builder.fmul(emit.load(total, at), scales[vector]) if adds_up else emit.zero()

        def load(k: Any) -> list[Any]:
            here = builder.add(vector, builder.mul(k, I64(emit.row_bytes)))
            return [emit.load_pairs(here, at) if pairs else emit.load(here, at) for at in offsets]

        after = None if adds_up else scales
        emit.accumulate(
            total, rows.literal_value, steps, load, (factor, row_step, k_step), before, after
        )
        return context.get_dummy_value()

    return _void(7, adds, rows, num_vectors, element), generate


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def soften(
    typing: Any, scores: Any, state: Any, tokens: Any, num_vectors: Any, element: Any
) -> Any:
    """Replace scores[token] by softmax numerators: float32, or pairs of two tokens' bfloat16 if element is bfloat16.

    scores: `tokens` rows of `num_vectors` vectors of LONGEST_VECTOR float32, an even number of rows.
    state: three such rows. They hold the highest scores so far and the totals so far, and receive the factors by which
    earlier sums are to be multiplied.  num_vectors: a literal.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit = Emitter(builder, num_vectors.literal_value * LONGEST_VECTOR, FLOAT32)
        score, state, tokens = args[:3]
        step = 4 // (element.dtype.bitwidth // 8)  # tokens of a word
        offsets = [emit.vector_bytes * i for i in range(emit.num_vectors)]
        before = [emit.load(state, at) for at in offsets]
        highest = [cgutils.alloca_once_value(builder, each) for each in before]
        with cgutils.for_range(builder, tokens) as loop:
            row = builder.add(score, builder.mul(loop.index, I64(emit.row_bytes)))
            for slot, at in zip(highest, offsets, strict=True):
                builder.store(emit.larger(builder.load(slot), emit.load(row, at)), slot)
        tops = [builder.load(slot) for slot in highest]
        totals = []
        for old, top, at in zip(before, tops, offsets, strict=True):
            factor = emit.exp(builder.fsub(old, top))
            emit.store(top, state, at)
            emit.store(factor, state, at + 2 * emit.row_bytes)
            total = builder.fmul(emit.load(state, at + emit.row_bytes), factor)
            totals.append(cgutils.alloca_once_value(builder, total))
        with cgutils.for_range(builder, builder.udiv(tokens, I64(step))) as loop:
            row = builder.add(score, builder.mul(loop.index, I64(step * emit.row_bytes)))
            # the scores at this place have been read
            place = builder.add(score, builder.mul(loop.index, I64(emit.row_bytes)))
            for slot, top, at in zip(totals, tops, offsets, strict=True):
                weights = []
                for i in range(step):
                    each = emit.load(row, at + i * emit.row_bytes)
                    weights.append(emit.unless_least(emit.exp(builder.fsub(each, top)), each))
                    builder.store(builder.fadd(builder.load(slot), weights[-1]), slot)
                emit.store(weights[0] if step == 1 else emit.pair(*weights), place, at)
        for slot, at in zip(totals, offsets, strict=True):
            emit.store(builder.load(slot), state, at + emit.row_bytes)
        return context.get_dummy_value()

    return _void(3, num_vectors, element), generate


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def copy_words(typing: Any, source: Any, target: Any, num_words: Any) -> Any:
    """Copy `num_words` words of four bytes. num_words: a literal."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit = Emitter(builder, num_words.literal_value, FLOAT32)
        for i in range(emit.num_vectors):
            emit.store(emit.load(args[0], emit.vector_bytes * i), args[1], emit.vector_bytes * i)
        return context.get_dummy_value()

    return _void(2, num_words), generate


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def interleave(typing: Any, first: Any, second: Any, target: Any, length: Any) -> Any:
    """Write two rows of `length` bfloat16 as one row of words: each word has a number of both. length: a literal."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit = Emitter(builder, length.literal_value, types.uint16)
        words = Emitter(builder, length.literal_value, FLOAT32)
        for i in range(emit.num_vectors):
            low, high = (emit.load(row, emit.vector_bytes * i) for row in args[:2])
            words.store(words.pair(low, high), args[2], words.vector_bytes * i)
        return context.get_dummy_value()

    return _void(3, length), generate


@intrinsic  # type: ignore[untyped-decorator]
def transpose_square(
    typing: Any, source: Any, source_step: Any, target: Any, target_step: Any
) -> Any:
    """Transpose a square of floats, LONGEST_VECTOR rows and columns, into target. Steps: bytes between two rows."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit = Emitter(builder, LONGEST_VECTOR, FLOAT32)
        size, lanes = LONGEST_VECTOR, ir.VectorType(I32, LONGEST_VECTOR)
        source, source_step, target, target_step = args
        rows = [
            emit.load(builder.add(source, builder.mul(I64(i), source_step)), 0) for i in range(size)
        ]
        apart = size // 2
        # swap the two blocks off the diagonal; then do the same in each of the four blocks, and so on
        while apart:
            upper = [lane if not lane & apart else lane + size - apart for lane in range(size)]
            lower = [lane + apart if not lane & apart else lane + size for lane in range(size)]
            for i in range(size):
                if not i & apart:
                    pair = rows[i], rows[i + apart]
                    rows[i], rows[i + apart] = (
                        builder.shuffle_vector(*pair, lanes(each)) for each in (upper, lower)
                    )
            apart //= 2
        for i, row in enumerate(rows):
            emit.store(row, builder.add(target, builder.mul(I64(i), target_step)), 0)
        return context.get_dummy_value()

    return _void(4), generate


def _void(num_args: int, *constants: Any) -> Any:
    """Return an intrinsic's signature, with its literals and types: Numba tells its variants apart by this alone."""
    return types.void(*[types.int64] * num_args, *constants)


def _vector_length(head_dim: int) -> int:
    """Return the length of the longest vector that divides a head: a power of two, at most LONGEST_VECTOR."""
    return min(LONGEST_VECTOR, head_dim & -head_dim)


class Emitter:
    """Emits vector instructions over the numbers of one head."""

    def __init__(self, builder: Any, head_dim: int, element: Any) -> None:
        self._builder = builder
        self._length = _vector_length(head_dim)
        self._type = ir.VectorType(F32, self._length)
        self._words = ir.VectorType(I32, self._length)
        self._is_wide = element == FLOAT32
        self._element_bytes = element.bitwidth // 8
        self.num_vectors = head_dim // self._length
        self.vector_bytes = self._length * self._element_bytes
        self.row_bytes = head_dim * self._element_bytes

    def zero(self) -> Any:
        return self._splat_float(0.0)

    def load(self, address: Any, offset: int) -> Any:
        """Load a vector of numbers as float32."""
        stored = self._type if self._is_wide else ir.VectorType(I16, self._length)
        loaded = self._builder.load(self._pointer(address, offset, stored))
        loaded.align = self._element_bytes
        if self._is_wide:
            return loaded
        return widen(self._builder, loaded, ir.VectorType(I32, self._length), self._type)

    def load_pairs(self, address: Any, offset: int) -> Any:
        """Load words of two bfloat16 each, as integers."""
        loaded = self._builder.load(self._pointer(address, offset, self._words))
        loaded.align = FLOAT_BYTES
        return loaded

    def store(self, vector: Any, address: Any, offset: int) -> None:
        self._builder.store(vector, self._pointer(address, offset, vector.type)).align = FLOAT_BYTES

    def prefetch(self, address: Any) -> None:
        """Prefetch one row of head_dim numbers into the second cache: in the first, it would evict the block in use."""
        byte = ir.IntType(8).as_pointer()
        flag = I32
        kind = ir.FunctionType(ir.VoidType(), [byte, flag, flag, flag])
        function = cgutils.get_or_insert_function(self._builder.module, kind, "llvm.prefetch.p0")
        for offset in range(0, self.row_bytes, CACHE_LINE):
            line = self._builder.inttoptr(self._builder.add(address, I64(offset)), byte)
            # 0: for reading.  2: into the second cache.  1: data
            self._builder.call(function, (line, flag(0), flag(2), flag(1)))

    def splat(self, number: Any) -> Any:
        nothing = ir.VectorType(number.type, self._length)(ir.Undefined)
        one = self._builder.insert_element(nothing, number, I32(0))
        return self._builder.shuffle_vector(one, nothing, self._words([0] * self._length))

    def multiply_add(self, a: Any, b: Any, c: Any) -> Any:
        product = self._builder.fmul(a, b, flags=("contract",))
        return self._builder.fadd(
            product, c, flags=("contract",)
        )  # one instruction where there is one

    def add_dot(self, a: Any, b: Any, c: Any) -> Any:
        """c + the products of two pairs of bfloat16, in one instruction where there is one. a, b: words."""
        builder = self._builder
        if DOT_PAIRS is not None and self._length == LONGEST_VECTOR:
            kind = ir.FunctionType(self._type, [self._type, self._words, self._words])
            return builder.call(
                cgutils.get_or_insert_function(builder.module, kind, DOT_PAIRS), (c, a, b)
            )
        for split in (self._low_half, self._high_half):
            c = self.multiply_add(split(a), split(b), c)
        return c

    def pair(self, low: Any, high: Any) -> Any:
        """Round two vectors of float32, 0 or more, to the nearest bfloat16; return words that hold a number of each."""
        builder = self._builder
        half = self._splat_int(0x8000)
        low, high = (builder.add(builder.bitcast(each, self._words), half) for each in (low, high))
        upper = builder.and_(high, self._splat_int(-0x10000))
        return builder.or_(builder.lshr(low, self._splat_int(16)), upper)

    def larger(self, a: Any, b: Any) -> Any:
        """Return the larger number of each lane; that of b where either is NaN."""
        return self._builder.select(self._builder.fcmp_ordered(">", a, b), a, b)

    def exp(self, x: Any) -> Any:
        """exp(x) for float32 x of 0 or less."""
        return emit_exp(self._builder, x, self._splat_float, self._splat_int)

    def unless_least(self, numbers: Any, scores: Any) -> Any:
        """Return the numbers, with 0 where the score is LEAST: the query does not see that token."""
        seen = self._builder.fcmp_unordered(">", scores, self._splat_float(float(LEAST)))
        return self._builder.select(seen, numbers, self.zero())

    def _splat_float(self, number: float) -> Any:
        return self._type([number] * self._length)

    def _splat_int(self, number: int) -> Any:
        return self._words([number] * self._length)

    def _low_half(self, words: Any) -> Any:
        return self._builder.bitcast(self._builder.shl(words, self._splat_int(16)), self._type)

    def _high_half(self, words: Any) -> Any:
        return self._builder.bitcast(
            self._builder.and_(words, self._splat_int(-0x10000)), self._type
        )

    def accumulate(
        self,
        sums: Any,
        rows: int,
        steps: Any,
        load: Any,
        factors: Any,
        before: Any,
        after: Any = None,
    ) -> None:
        """Add to each row of sums, for k below `steps`, the vectors load(k) times the row's factor of k.

        load may return words that are pairs of bfloat16; then the factors are pairs too.
        factors: the address of the first, the bytes from row to row, and the bytes from step to step.
        before(offset, number of the vector): what a vector of sums begins with.
        after: vectors that the results are multiplied by, or None.
        """
        builder = self._builder
        factor, row_step, k_step = factors
        offsets = [
            [self.row_bytes * r + self.vector_bytes * i for i in range(self.num_vectors)]
            for r in range(rows)
        ]
        # LLVM turns these stack slots into registers
        slots = [
            [cgutils.alloca_once_value(builder, before(at, i)) for i, at in enumerate(row)]
            for row in offsets
        ]
        with cgutils.for_range(builder, steps) as loop:
            loaded = load(loop.index)
            place = builder.add(factor, builder.mul(loop.index, k_step))
            for r, row in enumerate(slots):
                address = builder.add(place, builder.mul(I64(r), row_step))
                kind = loaded[0].type.element
                number = self.splat(builder.load(builder.inttoptr(address, kind.as_pointer())))
                add = self.add_dot if kind == I32 else self.multiply_add
                for slot, vector in zip(row, loaded, strict=True):
                    builder.store(add(number, vector, builder.load(slot)), slot)
        for row, places in zip(slots, offsets, strict=True):
            for i, (slot, at) in enumerate(zip(row, places, strict=True)):
                total = builder.load(slot)
                self.store(total if after is None else builder.fmul(total, after[i]), sums, at)

    def add_product(self, total: Any, factors: Any) -> Any:
        """Return total + the product of both factors; total None is 0."""
        a, b = factors
        return self.multiply_add(a, b, self.zero() if total is None else total)

    @property
    def sums_four(self) -> bool:
        """Whether `sum_four` knows vectors of this length."""
        return self._length >= 4

    def sum_four(self, vectors: Any) -> Any:
        """Sum each of four vectors, and return a vector of the four sums. `sum` would take twice the instructions."""
        builder = self._builder
        width = self._length // 4

        def shuffle(a: Any, b: Any, lanes: list[int]) -> Any:
            return builder.shuffle_vector(a, b, ir.VectorType(I32, len(lanes))(lanes))

        def halved(a: Any, b: Any, part: int) -> Any:
            """Add the upper half of each part to its lower half; the two vectors become one."""
            starts = range(0, 2 * self._length, part)
            lower = [start + i for start in starts for i in range(part // 2)]
            return builder.fadd(
                shuffle(a, b, lower), shuffle(a, b, [lane + part // 2 for lane in lower])
            )

        pairs = [halved(vectors[i], vectors[i + 1], self._length) for i in (0, 2)]
        total = halved(pairs[0], pairs[1], self._length // 2)
        while width > 1:
            turned = [lane ^ (width // 2) for lane in range(self._length)]
            total = builder.fadd(total, shuffle(total, total, turned))
            width //= 2
        return shuffle(total, total, [i * (self._length // 4) for i in range(4)])

    def sum(self, vector: Any) -> Any:
        """Return the sum of a vector's numbers."""
        half = self._length
        builder = self._builder
        while half > 1:  # add the upper half to the lower one
            half //= 2
            lanes = ir.VectorType(I32, half)
            unused = ir.VectorType(F32, 2 * half)(ir.Undefined)
            lower = builder.shuffle_vector(vector, unused, lanes(list(range(half))))
            upper = builder.shuffle_vector(vector, unused, lanes(list(range(half, 2 * half))))
            vector = builder.fadd(lower, upper)
        return builder.extract_element(vector, I32(0))

    def _pointer(self, address: Any, offset: int, kind: Any) -> Any:
        place = self._builder.add(address, I64(offset))
        return self._builder.inttoptr(place, kind.as_pointer())
