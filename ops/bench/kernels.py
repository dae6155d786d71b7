"""Each kernel's time beside the least it can take: its bytes over the copy bandwidth, or its operations.

    python -m ops.bench.kernels                    # the Triton kernels on a GPU, the CPU backends without one
    TRITON_INTERPRET=1 python -m ops.bench.kernels --dry-run   # tiny, in the interpreter

Sizes are Qwen3-0.6B's in bfloat16 on a GPU, q54m's in float32 on a CPU. Bytes count what must be read and
written once. On a GPU the caches are flushed before each run, and the median of many is taken.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from engine.attention import load_backend
from engine.attention.features import AttentionFeatures
from engine.attention.kv_cache import LayerKVCache
from engine.errors import ConfigError
from ops.bench.floor import Ceilings, measure_ceilings, seconds_of
from ops.bench.make import SHAPES, Shape
from ops.bench.report import gemm_ms, print_machine
from ops.bench.table import print_table

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Case:
    """One call of a kernel. num_bytes: read and written.  flops: of matrix products, 0 where it has none."""

    name: str
    run: Callable[[], object]
    num_bytes: int
    flops: int = 0

    def floor_s(self, ceilings: Ceilings) -> float:
        """The larger of its two least times."""
        return max(self.num_bytes / ceilings.bandwidth, self.flops / ceilings.flops)


@dataclass(frozen=True)
class Found:
    """A case's seconds beside its floor; bytes per second of what it must move."""

    name: str
    seconds: float
    floor_s: float
    bandwidth: float


@dataclass(frozen=True)
class Paged:
    """Sequences in a random pool, as one layer's attention sees them.

    query_lens, context_lens: [seqs] int64.  tables: [seqs, blocks] int32.
    """

    query: Tensor
    cache: LayerKVCache
    tables: np.ndarray[tuple[int, int], np.dtype[np.int32]]
    query_lens: np.ndarray[tuple[int], np.dtype[np.int64]]
    context_lens: np.ndarray[tuple[int], np.dtype[np.int64]]

    @property
    def features(self) -> AttentionFeatures:
        """Plain attention over these heads."""
        heads, head_dim = self.query.shape[1:]
        return AttentionFeatures(heads, self.cache.keys.shape[2], head_dim, head_dim**-0.5)

    @property
    def num_bytes(self) -> int:
        """Keys and values of all contexts, queries in and out."""
        row = self.cache.keys.shape[2] * self.cache.keys.shape[3] * self.cache.keys.element_size()
        return 2 * int(self.context_lens.sum()) * row + 2 * self.query.nbytes

    @property
    def flops(self) -> int:
        """Scores and weighted sums of the keys that each query may see."""
        pairs = self.query_lens * self.context_lens - self.query_lens * (self.query_lens - 1) // 2
        return 4 * self.query.shape[1] * self.query.shape[2] * int(pairs.sum())


def make_paged(
    shape: Shape, context_lens: list[int], query_lens: list[int], device: torch.device, dtype: torch.dtype
) -> Paged:
    """Random numbers in shuffled blocks."""
    num_blocks = [-(-n // BLOCK_SIZE) for n in context_lens]
    order = np.random.default_rng(0).permutation(sum(num_blocks)).astype(np.int32)
    tables = np.zeros((len(context_lens), max(num_blocks)), np.int32)
    for row, blocks in zip(tables, np.split(order, np.cumsum(num_blocks)[:-1]), strict=True):
        row[: len(blocks)] = blocks
    pool = (sum(num_blocks), BLOCK_SIZE, shape.num_kv_heads, shape.head_dim)
    keys, values = (torch.randn(pool, dtype=dtype, device=device) for _ in range(2))
    query = torch.randn((sum(query_lens), shape.num_heads, shape.head_dim), dtype=dtype, device=device)
    return Paged(query, LayerKVCache(keys, values), tables, np.array(query_lens), np.array(context_lens))


def attention_case(name: str, paged: Paged, backend_name: str, device: torch.device) -> Case:
    """Attention of one layer through a backend. Raises ConfigError if there is no such backend here."""
    backend = load_backend(backend_name, device)
    metadata = backend.build_metadata(paged.tables, paged.context_lens, paged.query_lens)
    output = backend.forward(paged.query, paged.cache, metadata, paged.features)
    assert output.isfinite().all(), f"{name} gives NaN or infinity"
    return Case(
        name,
        lambda: backend.forward(paged.query, paged.cache, metadata, paged.features),
        paged.num_bytes,
        paged.flops,
    )


def contexts(num_seqs: int, low: int, high: int) -> list[int]:
    """Random context lengths, the same each time."""
    rng = random.Random(0)
    return [rng.randint(low, high) for _ in range(num_seqs)]


def triton_cases(shape: Shape, device: torch.device, dtype: torch.dtype, *, dry_run: bool) -> Iterator[Case]:
    """Attention at several sizes, and the kernels of the layers for a decode batch and for a prefill."""
    tiny = [("3 sequences", [20, 7, 33])]
    decodes = tiny if dry_run else [
        ("256 sequences, contexts 100..2,048", contexts(256, 100, 2048)),
        ("256 sequences, context 512", [512] * 256),
        ("16 sequences, context 4,096", [4096] * 16),
        ("1 sequence, context 32,768", [32_768]),
    ]  # fmt: skip
    for label, lens in decodes:
        paged = make_paged(shape, lens, [1] * len(lens), device, dtype)
        yield attention_case(f"decode attention, {label}", paged, "triton", device)
    prefills = tiny if dry_run else [
        ("8 prompts of 1,024", [1024] * 8),
        ("32 prompts of 256", [256] * 32),
        ("1 prompt of 8,192", [8192]),
    ]  # fmt: skip
    for label, lens in prefills:
        paged = make_paged(shape, lens, lens, device, dtype)
        yield attention_case(f"prefill attention, {label}", paged, "triton", device)
    for num_tokens in (5,) if dry_run else (256, 8192):
        for case in layer_cases(shape, num_tokens, device, dtype):
            yield replace(case, name=f"{case.name}, {num_tokens:,} tokens")


def layer_cases(shape: Shape, num_tokens: int, device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """One layer's other kernels on num_tokens tokens."""
    from engine.kernels.gate_and_mul import silu_and_mul
    from engine.kernels.kv_store import store_kv  # Triton's, which a CPU user need not have
    from engine.kernels.rms_norm import add_rms_norm
    from engine.kernels.rotary import norm_rotate_and_store

    def random_tensor(*size: int) -> Tensor:
        return torch.randn(size, dtype=dtype, device=device)

    dim, head_dim = shape.hidden_size, shape.head_dim
    x, residual, weight = random_tensor(num_tokens, dim), random_tensor(num_tokens, dim), random_tensor(dim)
    yield Case("add + RMSNorm", lambda: add_rms_norm(x, residual, weight, 1e-6), 4 * x.nbytes)
    query = random_tensor(num_tokens, shape.num_heads, head_dim)
    key = random_tensor(num_tokens, shape.num_kv_heads, head_dim)
    rotation = (random_tensor(num_tokens, 1, head_dim), random_tensor(num_tokens, 1, head_dim))
    norms = (random_tensor(head_dim), random_tensor(head_dim))
    half_of_each = rotation[0].nbytes  # the second half of cosines and sines repeats the first
    pool = (-(-num_tokens // BLOCK_SIZE), BLOCK_SIZE, shape.num_kv_heads, head_dim)
    keys, values = random_tensor(*pool), random_tensor(*pool)
    slots = torch.randperm(pool[0] * BLOCK_SIZE, device=device)[:num_tokens]
    yield Case(
        "head norms + rotary + store",
        lambda: norm_rotate_and_store(query, key, key, rotation, norms, 1e-6, keys, values, slots),
        2 * (query.nbytes + 2 * key.nbytes) + half_of_each,
    )
    yield Case("store K and V", lambda: store_kv(key, key, keys, values, slots), 4 * key.nbytes)
    gate_up = random_tensor(num_tokens, 2 * shape.intermediate_size)
    yield Case("SiLU · mul", lambda: silu_and_mul(gate_up), gate_up.nbytes * 3 // 2)


def cpu_cases(shape: Shape) -> Iterator[Case]:
    """Decode attention of 64 sequences through each CPU backend that is there."""
    device = torch.device("cpu")
    paged = make_paged(shape, contexts(64, 64, 512), [1] * 64, device, torch.float32)
    for name in ("torch", "cpu"):
        try:
            yield attention_case(f"{name}: decode, 64 sequences, contexts 64..512", paged, name, device)
        except ConfigError as error:
            print(f"no backend {name!r} here: {error}")


def time_case(case: Case, ceilings: Ceilings, device: torch.device) -> Found:
    """Time one case."""
    if device.type == "cuda":
        from triton.testing import do_bench

        seconds = do_bench(case.run, warmup=20, rep=100, return_mode="median") / 1000
    else:
        seconds = seconds_of(case.run, device, repeats=3)
    return Found(case.name, seconds, case.floor_s(ceilings), case.num_bytes / seconds)


def run_cases(
    cases: Iterable[Case], ceilings: Ceilings, device: torch.device, json_file: Path | None
) -> None:
    """Time each case, write what was found after each, and print a table."""
    found: list[Found] = []
    with torch.inference_mode():
        for case in cases:
            found.append(time_case(case, ceilings, device))
            if json_file:
                rows = [asdict(each) for each in found]
                json_file.write_text(json.dumps({"ceilings": asdict(ceilings), "kernels": rows}))
    print_table(
        ["one call", "µs", "floor, µs", "floor ÷ time", "GB/s", "of copy bandwidth"],
        [
            [
                each.name,
                f"{1e6 * each.seconds:,.1f}",
                f"{1e6 * each.floor_s:,.1f}",
                f"{each.floor_s / each.seconds:.0%}",
                f"{each.bandwidth / 1e9:,.0f}",
                f"{each.bandwidth / ceilings.bandwidth:.0%}",
            ]
            for each in found
        ],
    )


def main() -> None:
    """Measure the ceilings and each case; print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="Triton's kernels, tiny, on a CPU")
    parser.add_argument("--threads", type=int, help="of torch; all cores without it")
    parser.add_argument("--json", type=Path, help="written anew after each case")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    device = torch.device("cuda" if torch.cuda.is_available() and not options.dry_run else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    print_machine()
    ceilings = measure_ceilings(device, dtype)
    print(
        f"{ceilings}; 512 x 512 float32 product on the CPU {gemm_ms(torch.get_num_threads()):.2f} ms",
        flush=True,
    )
    if options.dry_run or device.type == "cuda":
        shape = SHAPES["tiny" if options.dry_run else "q06b"]
        cases = triton_cases(shape, device, dtype, dry_run=options.dry_run)
    else:
        cases = cpu_cases(SHAPES["q54m"])
    run_cases(cases, ceilings, device, options.json)


if __name__ == "__main__":
    main()
