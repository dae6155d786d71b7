"""Products of a decode step, the LM head and the sampler.

Each product by torch, which calls cuBLAS, and with norm, gate and sum in the same launch.
"""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention import load_backend
from engine.kernels.upload import upload
from engine.sampling.sampling_batch import SamplingBatch, neutral_rows, sampling_row
from engine.sampling.sampling_params import SamplingParams
from engine.sampling.sampling_rows import SamplingRows, sampling_columns
from ops.bench.kernels.timing import Case
from ops.bench.make import Shape

EPS = 1e-6
SAMPLED = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature 0.6": SamplingParams(temperature=0.6),
    "temperature 0.6, top_p 0.95": SamplingParams(temperature=0.6, top_p=0.95),
    "temperature 0.6, top_p 0.95, top_k 20": SamplingParams(temperature=0.6, top_p=0.95, top_k=20),
    "temperature 0.6, min_p 0.05": SamplingParams(temperature=0.6, min_p=0.05),
}


def product_cases(shape: Shape, rows: int, device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """Each product of so many rows: cuBLAS alone, and with the launches beside it."""
    # Triton's, which a CPU user need not have
    from engine.kernels.products.gate_and_mul import silu_and_mul
    from engine.kernels.rms_norm import add_rms_norm

    def random(*size: int) -> Tensor:
        return torch.randn(size, dtype=dtype, device=device)

    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    hidden, inner = shape.hidden_size, shape.intermediate_size
    x, norm = random(rows, hidden), random(hidden)
    attended, gated = random(rows, queries), random(rows, inner)
    qkv, o = random(queries + 2 * keys, hidden), random(hidden, queries)
    gate_up, down = random(2 * inner, hidden), random(hidden, inner)

    def normed() -> Tensor:
        return add_rms_norm(x, x, norm, EPS)[0]

    ways: dict[str, tuple[Tensor, Tensor, dict[str, Callable[[], object]]]] = {
        "qkv": (x, qkv, {
            "cuBLAS": lambda: F.linear(x, qkv),
            "norm + cuBLAS": lambda: F.linear(normed(), qkv),
        }),
        "o": (attended, o, {
            "cuBLAS": lambda: F.linear(attended, o),
        }),
        "gate and up": (x, gate_up, {
            "cuBLAS": lambda: F.linear(x, gate_up),
            "norm + cuBLAS + SiLU": lambda: silu_and_mul(F.linear(normed(), gate_up)),
        }),
        "down": (gated, down, {
            "cuBLAS": lambda: F.linear(gated, down),
        }),
    }  # fmt: skip
    for name, (left, weight, calls) in ways.items():
        for way, call in calls.items():
            yield _product(f"{name}, {rows} rows, {way}", call, left, weight)
    head = random(shape.vocab_size, hidden)
    yield _product(f"LM head, {rows} rows, cuBLAS", lambda: F.linear(x, head), x, head)


def _product(name: str, call: Callable[[], object], x: Tensor, weight: Tensor) -> Case:
    """Its floor: x and weight are read once, the product is written."""
    num_out, num_in = weight.shape
    num_bytes = weight.nbytes + x.nbytes + len(x) * num_out * x.element_size()
    return Case(name, call, num_bytes, 2 * len(x) * num_out * num_in)


def sampler_cases(shape: Shape, rows: int, device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """A step's sampling, each way; its floor is one read of the logits."""
    logits = torch.randn((rows, shape.vocab_size), device=device).to(dtype)
    backend = load_backend("triton", device)
    for name, params in SAMPLED.items():
        values = neutral_rows(rows)
        values[:] = [sampling_row(params, seed, 0) for seed in range(rows)]
        batch = SamplingBatch(values, np.arange(rows, dtype=np.uint64))
        on_device = SamplingRows(*upload(sampling_columns(batch), device))
        yield Case(f"sampler, {rows} rows, {name}", partial(backend.sample, logits, on_device), logits.nbytes)
