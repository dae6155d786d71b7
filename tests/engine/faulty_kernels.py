"""Kernels made to fail each check of ops/bench/static, and one that passes all."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

from ops.bench.static.kernel_cases import META, Case, Kernel


@triton.jit(do_not_specialize=["num_rows"])
def good_kernel(out_ptr, x_ptr, num_rows, SIZE: tl.constexpr):
    places = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    x = tl.load(x_ptr + places, mask=places < num_rows * SIZE, other=0.0)
    tl.store(out_ptr + places, x * 2.0, mask=places < num_rows * SIZE)


@triton.jit(do_not_specialize=["num_rows"])
def spilling_kernel(out_ptr, x_ptr, num_rows, SIZE: tl.constexpr):
    """A tile of SIZE x SIZE, held by too few threads."""
    places = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    x = tl.load(x_ptr + places).to(tl.float32)
    for _ in tl.range(0, num_rows):
        x = x * tl.sum(x, 0)[None, :] + tl.sum(x, 1)[:, None]
    tl.store(out_ptr + places, x.to(out_ptr.dtype.element_ty))


@triton.jit
def specialized_kernel(out_ptr, x_ptr, num_rows, SIZE: tl.constexpr):
    """Compiled for a row count of 1, for multiples of 16, and for all others."""
    places = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    x = tl.load(x_ptr + places, mask=places < num_rows * SIZE, other=0.0)
    tl.store(out_ptr + places, x, mask=places < num_rows * SIZE)


@triton.jit(do_not_specialize=["num_rows"])
def narrow_kernel(out_ptr, x_ptr, num_rows, SIZE: tl.constexpr):
    """Neighbouring threads read numbers that lie apart."""
    places = tl.program_id(0) + tl.arange(0, SIZE) * num_rows
    tl.store(out_ptr + places, tl.load(x_ptr + places))


@triton.jit(do_not_specialize=["num_rows"])
def crowded_kernel(out_ptr, x_ptr, num_rows, SIZE: tl.constexpr):
    """A product without matrix instructions, over a tile that leaves room for few programs."""
    places = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    x = tl.load(x_ptr + places).to(tl.float32)
    tl.store(out_ptr + places, (x * tl.sum(x, 1)[:, None] * num_rows).to(out_ptr.dtype.element_ty))


@triton.jit
def unlisted_kernel(out_ptr, x_ptr, num_rows, SIZE: tl.constexpr):
    tl.store(out_ptr, num_rows)


def launch(kernel: Any, size: int, num_warps: int, num_rows: int) -> None:
    x = torch.empty(size * size, dtype=torch.bfloat16, device=META)
    kernel[(1,)](x, x, num_rows, SIZE=size, num_warps=num_warps)


def case(kernel: Any, size: int, num_warps: int) -> Case:
    call: Callable[[int], None] = partial(launch, kernel, size, num_warps)
    return Case(kernel.fn.__name__.removesuffix("_kernel"), call)


KERNELS = {
    "good_kernel": Kernel(),
    "spilling_kernel": Kernel(warps=1, wide=0.0),
    "specialized_kernel": Kernel(),
    "narrow_kernel": Kernel(),
    "crowded_kernel": Kernel(product="mma", buffers=2),
    "missing_kernel": Kernel(),
}
CASES = (
    case(good_kernel, 1024, 4),
    case(spilling_kernel, 128, 1),
    case(specialized_kernel, 1024, 4),
    case(narrow_kernel, 1024, 4),
    case(crowded_kernel, 128, 4),
    case(unlisted_kernel, 16, 4),
)
