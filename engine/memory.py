"""How much memory this process may still take."""

from __future__ import annotations

from pathlib import Path

GIB = 2**30
CPU_KV_CACHE_LIMIT = 4 * GIB
CPU_KV_CACHE_SHARE = 4  # a quarter, so that two workers fit on a laptop


def default_cpu_kv_cache_bytes(num_ranks: int) -> int:
    """For each rank the smaller of 4 GiB and its part of a quarter of the memory still allowed."""
    return min(CPU_KV_CACHE_LIMIT, allowed_bytes() // CPU_KV_CACHE_SHARE // num_ranks)


def allowed_bytes(proc: Path = Path("/proc"), cgroup_root: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes still free to this process: what the machine has available, less if a cgroup allows less.

    The paths are parameters for tests. Where neither can be read (not Linux), 4 GiB are assumed.
    """
    limits = [_mem_available(proc / "meminfo"), *_cgroup_headrooms(proc / "self/cgroup", cgroup_root)]
    return max(0, min((limit for limit in limits if limit is not None), default=4 * GIB))


def _mem_available(meminfo: Path) -> int | None:
    for line in _read(meminfo).splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _cgroup_headrooms(membership: Path, root: Path) -> list[int | None]:
    """What each cgroup around this process, version 2 or 1, has left."""
    headrooms = []
    for line in _read(membership).splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            base, limit, usage = root, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            base, limit, usage = root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        group = base / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder.is_relative_to(base):
                headrooms.append(_headroom(folder, limit, usage))
    return headrooms


def _headroom(folder: Path, limit_name: str, usage_name: str) -> int | None:
    """Limit less usage; page cache that the kernel would drop first does not count as used."""
    limit, usage = _read(folder / limit_name).strip(), _read(folder / usage_name).strip()
    if not limit.isdigit() or not usage.isdigit():
        return None  # "max", or no such file
    stat = dict(line.split() for line in _read(folder / "memory.stat").splitlines())
    inactive_file = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
    return int(limit) - int(usage) + inactive_file


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
