"""What every bench prints beside its figures: the machine, a small GEMM's time, tables and ratios."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Sequence
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


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Median, then least and most: "1.20 (1.10..1.40)"."""
    median, low, high = statistics.median(values), min(values), max(values)
    return f"{median:,.{digits}f} ({low:,.{digits}f}..{high:,.{digits}f})"


def print_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A table in Markdown, the first column to the left, the others to the right."""
    cells = [list(header), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    for row in [cells[0], rule, *cells[1:]]:
        first, *rest = row
        columns = [first.ljust(widths[0])]
        columns += [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
        print("| " + " | ".join(columns) + " |", flush=True)


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
