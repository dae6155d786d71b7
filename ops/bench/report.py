"""What benches print: the machine, spreads, tables. Torch is loaded for the machine alone."""

import os
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def print_machine() -> None:
    """Cores, processor, versions, torch's threads and the load now in one line; the GPU if there is one."""
    import torch

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
    print("machine: " + ", ".join(f"{name} {value}" for name, value in facts.items()), flush=True)


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


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
