"""Products of a decode step, the LM head and the sampler, beside the least each can take.

    python -m ops.bench.products --json products.json

Sizes are Qwen3-0.6B's in bfloat16, at 32, 128 and 256 rows: each product by torch, which calls cuBLAS.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from engine.attention import load_backend
from engine.sampling.params import SamplingParams
from engine.sampling.sampling_batch import SamplingBatch, neutral_rows, sampling_row
from engine.sampling.sampling_rows import SamplingRows
from ops.bench.floor import measure_ceilings
from ops.bench.kernels import Case, run_cases
from ops.bench.make import SHAPES, Shape
from ops.bench.report import print_machine

ROWS = (32, 128, 256)
SAMPLED = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature 0.6": SamplingParams(temperature=0.6),
    "temperature 0.6, top_p 0.95": SamplingParams(temperature=0.6, top_p=0.95),
    "temperature 0.6, top_p 0.95, top_k 20": SamplingParams(temperature=0.6, top_p=0.95, top_k=20),
    "temperature 0.6, min_p 0.05": SamplingParams(temperature=0.6, min_p=0.05),
}


def weights_of(shape: Shape) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of a layer's products, merged as the engine merges them, and of the LM head."""
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    hidden, inner = shape.hidden_size, shape.intermediate_size
    return {
        "qkv": (queries + 2 * keys, hidden), "o": (hidden, queries), "gate and up": (2 * inner, hidden),
        "down": (hidden, inner), "LM head": (shape.vocab_size, hidden),
    }  # fmt: skip


def product_cases(shape: Shape, rows: int, device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """Each product of so many rows."""
    for name, (num_out, num_in) in weights_of(shape).items():
        weight = torch.randn((num_out, num_in), dtype=dtype, device=device)
        x = torch.randn((rows, num_in), dtype=dtype, device=device)
        num_bytes = weight.nbytes + x.nbytes + rows * num_out * dtype.itemsize
        flops = 2 * rows * num_out * num_in
        yield Case(f"{name}, {rows} rows", partial(F.linear, x, weight), num_bytes, flops)


def sampler_cases(shape: Shape, rows: int, device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """A step's sampling, each way; its floor is one read of the logits."""
    logits = torch.randn((rows, shape.vocab_size), device=device).to(dtype)
    backend = load_backend("triton", device)
    for name, params in SAMPLED.items():
        values = neutral_rows(rows)
        values[:] = [sampling_row(params, seed, 0) for seed in range(rows)]
        batch = SamplingBatch(values, np.arange(rows, dtype=np.uint64), np.zeros((0, 2), np.int64))
        on_device = SamplingRows.upload(batch, device)
        yield Case(f"sampler, {rows} rows, {name}", partial(backend.sample, logits, on_device), logits.nbytes)


def main() -> None:
    """Measure the ceilings and each case; print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", choices=["products", "sampler"])
    parser.add_argument("--dry-run", action="store_true", help="tiny, on a CPU")
    parser.add_argument("--json", type=Path, help="written anew after each case")
    options = parser.parse_args()
    device = torch.device("cpu" if options.dry_run else "cuda")
    shape, dtype = (SHAPES["tiny"], torch.float32) if options.dry_run else (SHAPES["q06b"], torch.bfloat16)
    print_machine()
    ceilings = measure_ceilings(device, dtype)
    print(ceilings, flush=True)
    cases: list[Case] = []
    for rows in (2,) if options.dry_run else ROWS:
        if options.only != "sampler":
            cases += product_cases(shape, rows, device, dtype)
        if options.only != "products":
            cases += sampler_cases(shape, rows, device, dtype)
    run_cases(cases, ceilings, device, options.json)


if __name__ == "__main__":
    main()
