"""Products of a decode step, which torch leaves to cuBLAS, and the sampler."""

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F

from engine.attention import load_backend
from engine.kernels.upload import upload
from engine.sampling.sampling_batch import SamplingBatch, neutral_rows, sampling_row
from engine.sampling.sampling_params import SamplingParams
from engine.sampling.sampling_rows import SamplingRows
from ops.bench.kernels.timing import Case
from ops.bench.make import Shape

SAMPLED = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature 0.6": SamplingParams(temperature=0.6),
    "temperature 0.6, top_p 0.95": SamplingParams(temperature=0.6, top_p=0.95),
    "temperature 0.6, top_p 0.95, top_k 20": SamplingParams(temperature=0.6, top_p=0.95, top_k=20),
    "temperature 0.6, min_p 0.05": SamplingParams(temperature=0.6, min_p=0.05),
}


def product_cases(
    shape: Shape, rows: int, device: torch.device, dtype: torch.dtype
) -> Iterator[Case]:
    """Each product of so many rows; its floor: both sides are read once, the product is written."""
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    hidden, inner = shape.hidden_size, shape.intermediate_size
    sizes = {
        "qkv": (queries + 2 * keys, hidden),
        "o": (hidden, queries),
        "gate and up": (2 * inner, hidden),
        "down": (hidden, inner),
        "LM head": (shape.vocab_size, hidden),
    }
    for name, (num_out, num_in) in sizes.items():
        x, weight = (
            torch.randn((size, num_in), dtype=dtype, device=device) for size in (rows, num_out)
        )
        num_bytes = weight.nbytes + x.nbytes + rows * num_out * x.element_size()
        call = partial(F.linear, x, weight)
        yield Case(f"{name}, {rows} rows, cuBLAS", call, num_bytes, 2 * rows * num_out * num_in)


def sampler_cases(
    shape: Shape, rows: int, device: torch.device, dtype: torch.dtype
) -> Iterator[Case]:
    """A step's sampling, each way; its floor is one read of the logits."""
    logits = torch.randn((rows, shape.vocab_size), device=device).to(dtype)
    backend = load_backend("triton", device)
    for name, params in SAMPLED.items():
        values = neutral_rows(rows)
        values[:] = [sampling_row(params, seed, 0) for seed in range(rows)]
        columns = SamplingBatch(values, np.arange(rows, dtype=np.uint64)).columns()
        tensors = upload(list(columns.values()), device)
        on_device = SamplingRows(**dict(zip(columns, tensors, strict=True)))
        yield Case(
            f"sampler, {rows} rows, {name}",
            partial(backend.sample, logits, on_device),
            logits.nbytes,
        )
