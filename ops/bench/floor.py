"""What a device can do at most, measured, and the least time a workload can take on it.

A run's floor is the bytes it must read from memory (KV of every decode step, weights once a step) over the
copy bandwidth, plus the prompts' floating-point operations over the matrix rate.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ops.bench.make import Shape, tensor_sizes
from ops.bench.workload import Workload

COPY_BYTES = {"cuda": 4 * 2**30, "cpu": 2**26}
MATRIX_SIZE = {"cuda": 8192, "cpu": 512}


@dataclass(frozen=True)
class Ceilings:
    """bandwidth: bytes per second, read and written together, of a large copy.  flops: of a large product."""

    bandwidth: float
    flops: float

    def __str__(self) -> str:
        return f"copies {self.bandwidth / 1e9:,.0f} GB/s, products {self.flops / 1e12:,.1f} TFLOP/s"


@dataclass(frozen=True)
class Floor:
    """The least seconds of a run, by what takes them."""

    kv_reads: float
    weight_reads: float
    prefill: float

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.kv_reads + self.weight_reads + self.prefill

    def __str__(self) -> str:
        return f"KV reads {self.kv_reads:.2f}, weights {self.weight_reads:.2f}, prefill {self.prefill:.2f}"


def seconds_of(run: Callable[[], object], device: torch.device, repeats: int = 10) -> float:
    """Median seconds of `run` on the device, after a first run that does not count."""
    times = []
    for i in range(repeats + 1):
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            run()
            end.record()
            end.synchronize()
            took = float(start.elapsed_time(end)) / 1000
        else:
            started = time.perf_counter()
            run()
            took = time.perf_counter() - started
        if i:
            times.append(took)
    return statistics.median(times)


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Copy a buffer far larger than the caches; multiply large random matrices."""
    return Ceilings(_copy_bandwidth(device), _matrix_rate(device, dtype))


def _copy_bandwidth(device: torch.device) -> float:
    source = torch.randint(256, (COPY_BYTES[device.type],), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds_of(lambda: target.copy_(source), device)


def _matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    size = MATRIX_SIZE[device.type]
    a, b = (torch.randn((size, size), dtype=dtype, device=device) for _ in range(2))
    return 2 * size**3 / seconds_of(lambda: torch.mm(a, b), device)


def kv_bytes_per_token(shape: Shape, itemsize: int) -> int:
    """Keys and values of all layers."""
    return 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * itemsize


def floor_of(workload: Workload, shape: Shape, ceilings: Ceilings, itemsize: int) -> Floor:
    """The floor of a workload whose sequences all start at once and share nothing.

    Prefill gives each sequence its first token; decode step j reads the prompt and j tokens more.
    """
    reads = 0
    for prompt, length in zip(workload.prompts, workload.lengths, strict=True):
        steps = length - 1
        reads += steps * len(prompt) + steps * (steps + 1) // 2
    sizes = dict(tensor_sizes(shape))
    weights = sum(a * b for a, b in (size for size in sizes.values() if len(size) == 2))
    linear = (
        weights - shape.vocab_size * shape.hidden_size
    )  # the head sees one token of each prompt
    num_tokens = sum(map(len, workload.prompts))
    pairs = sum(len(prompt) * (len(prompt) + 1) // 2 for prompt in workload.prompts)
    attention = 4 * shape.num_layers * shape.num_heads * shape.head_dim * pairs
    return Floor(
        kv_reads=reads * kv_bytes_per_token(shape, itemsize) / ceilings.bandwidth,
        weight_reads=(max(workload.lengths) - 1) * weights * itemsize / ceilings.bandwidth,
        prefill=(2 * linear * num_tokens + attention) / ceilings.flops,
    )
