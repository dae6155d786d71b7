"""Operations on numbers and addresses that Numba does not have, emitted as LLVM code.

Addresses are plain int64, counted in bytes. Numbers in memory are FLOAT32 or BFLOAT16; kernels compute in
float32.
"""

import functools
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

FLOAT32 = types.float32
BFLOAT16 = types.uint16  # its bits, the upper half of a float32's: Numba has no such number
FLOAT_BYTES = 4

I8 = ir.IntType(8)
I16 = ir.IntType(16)
I32 = ir.IntType(32)
I64 = ir.IntType(64)
F32 = ir.FloatType()


def helper(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Compile a function that only kernels call. Code for calls from Python is left out: it took a fifth of the time.

    A helper with fastmath is inlined into each kernel that calls it. Otherwise the kernel would be linked with a copy
    of the helper that this process has already, and that copy may add in another order. A helper without fastmath is
    not inlined, so it must not call a helper with fastmath.
    """
    wrappers = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    compiled: Callable[[Callable[..., Any]], Any] = njit(
        **wrappers, forceinline="fastmath" in options, **options
    )
    return compiled


def emitted(kind: Any) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that makes an intrinsic of a function (builder, *arguments). kind: its Numba signature."""

    def make(emit: Callable[..., Any]) -> Any:
        def typed(typing: Any, *_: Any) -> Any:
            return kind, lambda context, builder, signature, args: emit(builder, *args)

        functools.update_wrapper(typed, emit)  # Numba matches calls with emit's parameters
        return intrinsic(typed)

    return make


@intrinsic  # type: ignore[untyped-decorator]
def pointer_to(typing: Any, address: Any, element: Any) -> Any:
    """Turn an address into a pointer to `element`, a scalar type such as numba.float32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(element.dtype)(types.int64, element), generate


@intrinsic  # type: ignore[untyped-decorator]
def row_pointer(typing: Any, address: Any, index: Any, stride: Any, element: Any) -> Any:
    """Return a pointer to row `index` of a matrix of `element` numbers; its rows are `stride` numbers apart."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        first = builder.mul(builder.mul(args[1], args[2]), I64(element.dtype.bitwidth // 8))
        kind = context.get_value_type(signature.return_type)
        return builder.inttoptr(builder.add(args[0], first), kind)

    return types.CPointer(element.dtype)(types.int64, types.int64, types.int64, element), generate


@emitted(types.int64(types.CPointer(types.int64), types.int64))
def fetch_add(builder: Any, counters: Any, index: Any) -> Any:
    """Add 1 to counters[index], an int64 behind a pointer, atomically; return the old value."""
    pointer = builder.gep(counters, [index])
    return builder.atomic_rmw("add", pointer, I64(1), "seq_cst")


@emitted(types.float64(types.int64))
def float_of(builder: Any, bits: Any) -> Any:
    """Return the float64 with these 64 bits."""
    return builder.bitcast(bits, ir.DoubleType())


@emitted(types.int32(FLOAT32))
def magnitude_bits(builder: Any, number: Any) -> Any:
    """Return the bits of |number|, a float32, as int32. They are ordered as magnitudes are, NaN above infinity."""
    return builder.and_(builder.bitcast(number, I32), I32(0x7FFFFFFF))


@emitted(FLOAT32(types.int32))
def float32_of(builder: Any, bits: Any) -> Any:
    """Return the float32 with these 32 bits."""
    return builder.bitcast(bits, F32)


@intrinsic  # type: ignore[untyped-decorator]
def wide(typing: Any, number: Any) -> Any:
    """Convert a number of either element type to float32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return args[0] if number == FLOAT32 else widen(builder, args[0], I32, F32)

    return FLOAT32(number), generate


@intrinsic  # type: ignore[untyped-decorator]
def narrow(typing: Any, number: Any, element: Any) -> Any:
    """Round a float32 to the nearest number of the element type, in a tie to the even one; NaN stays NaN."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if element.dtype == FLOAT32:
            return args[0]
        bits = builder.bitcast(args[0], I32)
        upper = builder.lshr(bits, I32(16))
        half = builder.add(I32(0x7FFF), builder.and_(upper, I32(1)))
        rounded = builder.lshr(builder.add(bits, half), I32(16))
        # NaN is found by its bits: LLVM may drop a comparison of floats if fastmath made the number
        is_nan = builder.icmp_unsigned(">", builder.and_(bits, I32(0x7FFFFFFF)), I32(0x7F800000))
        kept = builder.or_(upper, I32(0x40))
        return builder.trunc(builder.select(is_nan, kept, rounded), I16)

    return element.dtype(FLOAT32, element), generate


def widen(builder: Any, bits: Any, wide_bits: Any, floats: Any) -> Any:
    """Emit the float32 of bfloat16 bits, a scalar or vector. wide_bits, floats: LLVM's types of the result."""
    shift = (
        wide_bits(16) if isinstance(wide_bits, ir.IntType) else wide_bits([16] * wide_bits.count)
    )
    return builder.bitcast(builder.shl(builder.zext(bits, wide_bits), shift), floats)
