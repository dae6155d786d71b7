"""Compile every kernel for a Hopper GPU, which needs none, and print what came out as one JSON line each.

Run as a module in a process of its own, without TRITON_INTERPRET: the test beside it reads the lines.
"""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.kernels.decode_attention import DecodeRows, decode_attention
from engine.kernels.expert_groups import choose_experts, group_by_expert
from engine.kernels.gate_and_mul import clamped_swiglu_and_mul, gelu_and_mul, silu_and_mul
from engine.kernels.grouped_product import grouped_product
from engine.kernels.kv_store import store_kv
from engine.kernels.prefill_attention import PrefillTiles, prefill_attention
from engine.kernels.rms_norm import add_rms_norm, rms_norm
from engine.kernels.rotary import norm_rotate_and_store

HOPPER = GPUTarget("cuda", 90, 32)
DTYPES = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int32: "*i32",
    torch.int64: "*i64",
}  # fmt: skip
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


def compile_launch(kernel: Any, arguments: dict[str, Any], options: dict[str, int]) -> Any:
    """What a launch with these arguments would compile: the same types, constants and divisibility."""
    constexprs = {
        name for name, kind in inspect.get_annotations(kernel.fn).items() if "constexpr" in str(kind)
    }
    signature, attrs = {}, {}
    for i, name in enumerate(kernel.arg_names):
        value = arguments[name]
        if name in constexprs or value is None:
            signature[name] = "constexpr"
        elif isinstance(value, Tensor):
            signature[name], attrs[(i,)] = DTYPES[value.dtype], [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
            if isinstance(value, int) and value % 16 == 0 and name not in kernel.do_not_specialize:
                attrs[(i,)] = [["tt.divisibility", 16]]
    constants = {
        (i,): arguments[name] for i, name in enumerate(kernel.arg_names) if signature[name] == "constexpr"
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attrs)
    return triton.compile(source, target=HOPPER, options=options)


def report(compiled: Any) -> dict[str, int]:
    """Shared memory, stack (where registers spill) and matrix instructions of a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found, usage
    return {
        "registers": int(found[1]),
        "stack_bytes": int(found[2]),
        "shared_bytes": compiled.metadata.shared,
        "wgmma": compiled.asm["ptx"].count("wgmma.mma_async"),
        "mma": compiled.asm["ptx"].count("mma.sync"),
        "async_copies": compiled.asm["ttgir"].count("async_copy_global_to_local"),
    }


class Launches:
    """Stands in for launching: compiles instead, and prints a line."""

    def __init__(self, label: str) -> None:
        self.label = label

    def run(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        options = {name: kwargs.pop(name) for name in ("num_warps", "num_stages") if name in kwargs}
        arguments = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
        line = {"kernel": kernel.fn.__name__, "case": self.label}
        print(json.dumps(line | report(compile_launch(kernel, arguments, options))), flush=True)


def compile_all(label: str, call: Callable[[], object]) -> None:
    """Compile what `call` launches."""
    launches = Launches(label)
    triton.JITFunction.run = lambda kernel, *args, **kwargs: launches.run(kernel, *args, **kwargs)
    call()


def attention(
    dtype: torch.dtype,
    head_dim: int,
    group: int,
    num_splits: int,
    *,
    has_sinks: bool = False,
    **features: Any,
) -> None:
    """features: as the kernels name them."""
    heads, kv_heads = 8 * group, 8
    features |= {"scale": 0.1, "sinks": torch.empty(heads) if has_sinks else None}
    query = torch.empty((96, heads, head_dim), dtype=dtype)
    cache = torch.empty((4, 16, kv_heads, head_dim), dtype=dtype)
    ints, tables = torch.zeros(16, dtype=torch.int32), torch.zeros((16, 16), dtype=torch.int32)
    rows = DecodeRows(ints, ints, tables, 999)
    tiles = PrefillTiles(ints, ints, tables, ints, tables)
    decode_attention(query, cache, cache, rows, query, num_splits=num_splits, **features)
    prefill_attention(query, cache, cache, tiles, query, **features)


def layers(dtype: torch.dtype) -> None:
    """The sizes of Qwen3-0.6B."""
    merged = torch.empty((256, 32, 128), dtype=dtype)
    query, key, value = merged[:, :16], merged[:, 16:24], merged[:, 24:]
    weight, hidden = torch.empty(1024, dtype=dtype), torch.empty((256, 1024), dtype=dtype)
    cache, cos = torch.empty((4, 16, 8, 128), dtype=dtype), torch.empty((256, 1, 128), dtype=dtype)
    slots, norms = torch.zeros(256, dtype=torch.int64), (weight[:128], weight[:128])
    store_kv(key, value, cache, cache, slots)
    add_rms_norm(hidden, hidden, weight, 1e-6)
    norm_rotate_and_store(query, key, value, (cos, cos), norms, 1e-6, cache, cache, slots)
    silu_and_mul(torch.empty((256, 6144), dtype=dtype))


def other_layers(dtype: torch.dtype) -> None:
    """Gates by gelu, norms without a residual, weights in float32, a rotation of a quarter of each head."""
    merged = torch.empty((256, 32, 128), dtype=dtype)
    weight, hidden = torch.empty(1024), torch.empty((256, 1024), dtype=dtype)
    cache, cos = torch.empty((4, 16, 8, 128), dtype=dtype), torch.empty((256, 1, 32))
    slots, norms = torch.zeros(256, dtype=torch.int64), (weight[:128], weight[:128])
    rms_norm(hidden, weight, 1e-6)
    norm_rotate_and_store(
        merged[:, :16], merged[:, 16:24], merged[:, 24:], (cos, cos), norms, 1e-6, cache, cache, slots
    )
    gelu_and_mul(torch.empty((256, 6144), dtype=dtype))
    clamped_swiglu_and_mul(torch.empty((256, 5760), dtype=dtype), 1.702, 7.0)


def experts(dtype: torch.dtype, num_rows: int) -> None:
    """The sizes of gpt-oss-20b, whose hidden size is no multiple of a tile, and biases."""
    x, ends = torch.empty((num_rows, 2880), dtype=dtype), torch.zeros(32, dtype=torch.int32)
    grouped_product(x, torch.empty((32, 5760, 2880), dtype=dtype), torch.empty((32, 5760), dtype=dtype), ends)
    for normalised in (True, False):
        _, chosen = choose_experts(torch.empty((num_rows, 128), dtype=dtype), 8, normalised=normalised)
    group_by_expert(chosen, 128)


def main() -> None:
    compile_all("bfloat16 128 x2", lambda: attention(torch.bfloat16, 128, 2, 5))
    compile_all("bfloat16 128 x4 one split", lambda: attention(torch.bfloat16, 128, 4, 1))
    compile_all("bfloat16 64 x8", lambda: attention(torch.bfloat16, 64, 8, 32))
    compile_all("bfloat16 256 x16", lambda: attention(torch.bfloat16, 256, 16, 5))
    compile_all("float16 96 x1", lambda: attention(torch.float16, 96, 1, 5))
    compile_all("float32 128 x2", lambda: attention(torch.float32, 128, 2, 5))
    compile_all("float32 256 x1", lambda: attention(torch.float32, 256, 1, 5))
    # gpt-oss' layers with windows, Gemma 2's with them, and all at once
    gpt_oss = {"window": 128, "has_sinks": True}
    compile_all("bfloat16 64 x8 gpt-oss", lambda: attention(torch.bfloat16, 64, 8, 1, **gpt_oss))
    gemma = {"window": 4096, "soft_cap": 50.0}
    compile_all("bfloat16 256 x2 gemma", lambda: attention(torch.bfloat16, 256, 2, 5, **gemma))
    features = {**gemma, "chunk": 8192, "has_sinks": True}
    compile_all("float32 128 x4 features", lambda: attention(torch.float32, 128, 4, 5, **features))
    compile_all("bfloat16 layers", lambda: layers(torch.bfloat16))
    compile_all("bfloat16 other layers", lambda: other_layers(torch.bfloat16))
    compile_all("bfloat16 experts x16", lambda: experts(torch.bfloat16, 32 * 16))
    compile_all("bfloat16 experts x128", lambda: experts(torch.bfloat16, 32 * 128))
    compile_all("float32 experts x64", lambda: experts(torch.float32, 32 * 64))


if __name__ == "__main__":
    main()
