"""What a launch would compile for a GPU, and what of a multiprocessor it takes. It needs no GPU."""

import contextlib
import io
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.kernels.gpu_kind import GpuKind


@dataclass(frozen=True)
class Target:
    """A kind of GPU. shared_bytes: of a multiprocessor; a program gets 1 KiB less. warps, programs: it holds at once.

    Source: CUDA C++ programming guide, "Technical specifications per compute capability".
    """

    capability: int
    shared_bytes: int
    warps: int
    programs: int

    @property
    def kind(self) -> GpuKind:
        """Return what kernels choose their shapes by."""
        return GpuKind(*divmod(self.capability, 10))


TARGETS = {
    80: Target(80, 164 * 1024, warps=64, programs=32),  # A100
    86: Target(86, 100 * 1024, warps=48, programs=16),  # RTX 30, A10, A40
    89: Target(89, 100 * 1024, warps=48, programs=24),  # RTX 40, L4, L40
    90: Target(90, 228 * 1024, warps=64, programs=32),  # H100, H200
    100: Target(100, 228 * 1024, warps=64, programs=32),  # B200
    120: Target(120, 100 * 1024, warps=48, programs=24),  # RTX 50
}
HOPPER = TARGETS[90]
REGISTERS = 65_536
ALIGNMENT = 16
# Memory that is allocated without a value is what a loop's copies go to, one after another.
BUFFERS = r"local_alloc : \(\) -> !ttg\.memdesc<(\d+)x\d+x\d+x"
POINTERS = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float64: "*fp64",
    torch.float8_e4m3fn: "*fp8e4nv", torch.bool: "*i1", torch.uint8: "*u8", torch.int8: "*i8",
    torch.int32: "*i32", torch.int64: "*i64", torch.uint64: "*u64",
}  # fmt: skip

Constants = tuple[tuple[int, Any], ...]


@dataclass(frozen=True)
class Variant:
    """What is compiled once, whatever else a launch's arguments are.

    signature: each argument's name and type.  constants: those compiled in, by their place.
    aligned: places of those whose values are multiples of 16.  options: warps, stages and the like.
    """

    kernel: Any
    signature: tuple[tuple[str, str], ...]
    constants: Constants
    aligned: tuple[int, ...]
    options: tuple[tuple[str, Any], ...]

    @property
    def name(self) -> str:
        """The kernel's."""
        name: str = self.kernel.fn.__name__
        return name

    @property
    def named_constants(self) -> dict[str, Any]:
        """By the arguments' names."""
        return {self.signature[i][0]: value for i, value in self.constants}

    @property
    def is_fp8(self) -> bool:
        """It reads or writes FP8 numbers."""
        return any(kind == "*fp8e4nv" for _, kind in self.signature)

    @property
    def is_float32(self) -> bool:
        """It works on no 16-bit numbers, or it makes products of float32 ones."""
        return not any(kind in ("*bf16", "*fp16") for _, kind in self.signature)


@dataclass(frozen=True)
class Usage:
    """What a compiled variant takes, from the assembler's report, and how it moves memory, from its PTX.

    registers: of a thread.  spill_bytes: stored and loaded again.  shared_bytes: of a program.
    loads: instructions that read global memory, by the bytes each moves for one thread.
    products: matrix instructions, of a warp ("mma") or of a warp group ("wgmma").
    buffers: of each tensor that a loop copies ahead to shared memory, how many.
    fused: instructions that multiply and add float32 with one rounding.
    from_float16: conversions of float16 numbers, which FP8 ones become first, to another type.
    programs: how many of its programs a multiprocessor holds at once; 0 if none fits.
    """

    registers: int
    spill_bytes: int
    shared_bytes: int
    num_warps: int
    loads: dict[int, int]
    products: dict[str, int]
    buffers: tuple[int, ...]
    fused: int
    from_float16: int
    programs: int

    @property
    def wide_share(self) -> float:
        """Of the bytes that its instructions load, the share loaded by 16 and more at a time."""
        total = sum(width * count for width, count in self.loads.items())
        return sum(w * n for w, n in self.loads.items() if w >= ALIGNMENT) / total if total else 1.0


def programs_per_processor(
    registers: int, shared_bytes: int, num_warps: int, target: Target = HOPPER
) -> int:
    """Programs that share a multiprocessor's registers, memory and warps.

    Registers are given out to warps by 256; of shared memory each program takes 1 KiB more than it asks for,
    rounded up to 128 bytes.
    """
    if shared_bytes > target.shared_bytes - 1024:
        return 0
    registers_of_warp = -(-registers * 32 // 256) * 256
    warps_by_registers = (
        REGISTERS // registers_of_warp // 4 * 4
    )  # each quarter of the processor has its own
    shared = -(-shared_bytes // 128) * 128 + 1024
    return min(
        target.programs,
        target.warps // num_warps,
        warps_by_registers // num_warps,
        target.shared_bytes // shared,
    )


def variant_of(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Variant:
    """What a launch with these arguments compiles, by the rules of triton.runtime.jit.

    Pointers and integers are compiled for being multiples of 16, an integer 1 is compiled in, unless the
    kernel asks not to; None and constexprs are compiled in.
    """
    names = {param.name for param in kernel.params}
    options = {name: value for name, value in kwargs.items() if name not in names}
    given = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
    signature, constants, aligned = [], [], []
    for i, param in enumerate(kernel.params):
        value = given.get(param.name, param.default)
        kind = "constexpr" if param.is_constexpr or value is None else _kind(value)
        if not param.do_not_specialize and kind in ("i32", "i64") and value == 1:
            kind = "constexpr"
        if kind == "constexpr":
            constants.append((i, value))
        elif not (param.do_not_specialize or param.do_not_specialize_on_alignment) and _is_aligned(
            value
        ):
            aligned.append(i)
        signature.append((param.name, kind))
    return Variant(
        kernel, tuple(signature), tuple(constants), tuple(aligned), tuple(sorted(options.items()))
    )


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return POINTERS[value.dtype]
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def _is_aligned(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.data_ptr() % ALIGNMENT == 0
    return isinstance(value, int) and not isinstance(value, bool) and value % ALIGNMENT == 0


@contextlib.contextmanager
def recorded(record: Callable[[Variant], None]) -> Iterator[None]:
    """Within it kernels are not launched: each launch's variant goes to `record`."""
    launch = triton.JITFunction.run

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        record(variant_of(kernel, args, kwargs))

    triton.JITFunction.run = run
    try:
        yield
    finally:
        triton.JITFunction.run = launch


def compile_variant(variant: Variant, target: Target = HOPPER) -> Usage:
    """Compile it for a kind of GPU; Triton's cache must be empty, as only the assembler tells of spills."""
    source = ASTSource(
        fn=variant.kernel,
        signature=dict(variant.signature),
        constexprs={(i,): value for i, value in variant.constants},
        attrs={(i,): [["tt.divisibility", ALIGNMENT]] for i in variant.aligned},
    )
    report = io.StringIO()
    with triton.knobs.nvidia.scope(), contextlib.redirect_stdout(report):
        triton.knobs.nvidia.dump_ptxas_log = True
        gpu = GPUTarget("cuda", target.capability, 32)
        compiled = triton.compile(source, target=gpu, options=dict(variant.options))
    ptx: str = compiled.asm["ptx"]
    products = {"mma": ptx.count("mma.sync"), "wgmma": ptx.count("wgmma.mma_async")}
    registers = _number(r"Used (\d+) registers", report.getvalue())
    shared_bytes, num_warps = compiled.metadata.shared, compiled.metadata.num_warps
    return Usage(
        registers=registers,
        spill_bytes=_number(r"(\d+) bytes spill stores", report.getvalue())
        + _number(r"(\d+) bytes spill loads", report.getvalue()),
        shared_bytes=shared_bytes,
        num_warps=num_warps,
        loads=_widths(ptx),
        products={name: count for name, count in products.items() if count},
        buffers=tuple(int(count) for count in re.findall(BUFFERS, compiled.asm["ttgir"])),
        fused=len(re.findall(r"\bfma\.rn(?:\.ftz)?\.f32", ptx)),
        # an instruction names the type that it makes before the one that it reads
        from_float16=len(re.findall(r"\bcvt\.[\w.]+\.f16\s", ptx)),
        programs=programs_per_processor(registers, shared_bytes, num_warps, target),
    )


def _number(pattern: str, report: str) -> int:
    found = re.search(pattern, report)
    if found is None:
        raise RuntimeError(
            f"the assembler's report has no {pattern!r}; is Triton's cache empty? {report!r}"
        )
    return int(found[1])


def _widths(ptx: str) -> dict[int, int]:
    """Loads of global memory by their bytes, copies to shared memory among them."""
    widths = [
        math.prod(int(n) for n in re.findall(r"\.v(\d)", modifiers)) * int(bits) // 8
        for modifiers, bits in re.findall(r"ld\.global((?:[.:]+\w+)*?)\.[bufs](\d+)\s", ptx)
    ]
    widths += [int(size, 0) for size in re.findall(r"cp\.async\.c[ag]\.[^;]*?\], (0x\w+|\d+)", ptx)]
    return {width: widths.count(width) for width in sorted(set(widths), reverse=True)}
