"""What every bench prints beside its figures: the machine."""

import os
import platform
from pathlib import Path
from typing import Any

import torch


def print_machine() -> None:
    """Cores, processor, versions, torch's threads and the load now in one line; the GPU if there is one."""
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
