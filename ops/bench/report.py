"""What every bench prints beside its figures: the machine, and a small matrix product's time."""

from __future__ import annotations

import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import torch

GEMM_SIZE = 512


def machine_facts() -> dict[str, Any]:
    """Cores, processor, versions, torch's threads and the load now; the GPU where torch finds one."""
    facts: dict[str, Any] = {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": _cpu_model(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        **{name: os.environ.get(name, "not set") for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")},
        "load": round(os.getloadavg()[0], 1),
    }
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
    return facts


def print_machine() -> None:
    """The machine's facts in one line."""
    print("machine: " + ", ".join(f"{name} {value}" for name, value in machine_facts().items()), flush=True)


def gemm_ms(threads: int = 2, repeats: int = 20) -> float:
    """Median milliseconds of a float32 product of 512 x 512 matrices: shared machines drift, and it tells."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    a, b = torch.randn(GEMM_SIZE, GEMM_SIZE), torch.randn(GEMM_SIZE, GEMM_SIZE)
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        torch.mm(a, b)
        times.append(time.perf_counter() - started)
    torch.set_num_threads(before)
    return 1000 * statistics.median(times)


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
