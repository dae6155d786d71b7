"""Finds the memory that this process may still take, and divides it among the KV pool and states."""

import ctypes
import logging
from pathlib import Path
from typing import NamedTuple

from engine.checkpoint.adapter_folder import AdapterFolder
from engine.errors import ConfigError
from engine.run.config import EngineConfig
from engine.run.cpu_threads import PROC, ROOT, Cgroup, cgroups_of
from engine.run.forward.runner import StateRows

logger = logging.getLogger(__name__)

GIB = 2**30
# glibc's mallopt parameters (malloc.h) and the values they get.
M_TRIM_THRESHOLD = -1
M_TOP_PAD = -2
M_MMAP_THRESHOLD = -3
KEPT_FREE_BYTES = 2**31 - 1  # the largest an int holds
SPARE_HEAP_BYTES = 64 * 2**20
OLD_MMAP_LIMIT = 32 * 2**20
MOST_COUNTED = 1 << 16  # blocks of a model without keys and values: they take no memory
CPU_KV_CACHE_LIMIT = 4 * GIB
CPU_KV_CACHE_SHARE = 4  # a quarter, so that two workers fit on a laptop


def keep_freed_memory() -> None:
    """Let this process reuse the memory of a step's tensors, which glibc would give back to the kernel.

    A large prefill then pays for no page faults: 3.6 s in place of 4.6 s for 10,000 prompt tokens (q54m, 2
    threads). Source: mallopt(3).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    # Older C libraries refuse a threshold above 32 MiB. If none is set, the calls below freeze it at 128 KiB.
    if not (mallopt(M_MMAP_THRESHOLD, GIB) or mallopt(M_MMAP_THRESHOLD, OLD_MMAP_LIMIT)):
        logger.info("the C library refuses to keep freed memory: large prefills are slower")
        return
    mallopt(M_TRIM_THRESHOLD, KEPT_FREE_BYTES)
    mallopt(M_TOP_PAD, SPARE_HEAP_BYTES)


def give_back_memory() -> None:
    """Give the kernel the freed memory that this process keeps, as after an engine has closed."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def default_cpu_kv_cache_bytes(num_ranks: int) -> int:
    """Return a rank's default: 4 GiB, or its part of a quarter of the allowed memory if that is less."""
    return min(CPU_KV_CACHE_LIMIT, allowed_bytes() // CPU_KV_CACHE_SHARE // num_ranks)


def allowed_bytes(proc: Path = PROC, cgroup_root: Path = ROOT) -> int:
    """Return the bytes that this process may still take: those available on the machine, or a cgroup's if fewer.

    The paths are parameters for tests. If neither is there (not Linux), 4 GiB are assumed.
    """
    limits = [
        _mem_available(proc / "meminfo"),
        *map(_headroom, cgroups_of("memory", proc, cgroup_root)),
    ]
    return max(0, min((limit for limit in limits if limit is not None), default=4 * GIB))


def _mem_available(meminfo: Path) -> int | None:
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        return None
    available = (int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    return next(available, None)


def _headroom(group: Cgroup) -> int | None:
    """Return the limit minus the usage. Page cache that the kernel would drop first does not count as usage."""
    names = ("memory.max", "memory.current")
    if group.version == 1:
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
    limit, usage = map(group.read, names)
    if not limit.isdigit() or not usage.isdigit():
        return None  # "max", or no such file
    stat = dict(line.split() for line in group.read("memory.stat").splitlines())
    inactive_file = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
    return int(limit) - int(usage) + inactive_file


def adapter_bytes(config: EngineConfig, number_bytes: int) -> int:
    """Return the bytes of max_adapters adapters, each as large as the largest one that is in the folder now.

    number_bytes: of a number in the model's dtype. With tensor parallelism a rank takes less than this.
    """
    return config.max_adapters * AdapterFolder(config.adapters).largest() * number_bytes


class PoolSizes(NamedTuple):
    """Bytes on each rank: of a block of keys and values, and of a sequence's states."""

    block: int
    state: int


def check_pool_bytes(config: EngineConfig, most: int, owner: str) -> None:
    """Raise ConfigError if kv_cache_bytes is more than `most`, the bytes left. owner: whose bytes, in words."""
    if config.kv_cache_bytes is not None and config.kv_cache_bytes > most:
        raise ConfigError(
            f"kv_cache_bytes={config.kv_cache_bytes} on each rank is more than the {most} bytes left of {owner}; "
            "lower it, or leave it out"
        )


def divide_pool(
    sizes: PoolSizes, config: EngineConfig, most: int, default: int, longest: int
) -> tuple[int, StateRows | None]:
    """Return the number of the KV pool's blocks, and the rows of states beside it. Raises ConfigError if no state fits.

    most: the bytes that blocks and states may take together.  default: those that they take without kv_cache_bytes.
    longest: the most tokens of a sequence.
    """
    states = fit_states(sizes.state, config, most, default)
    if not sizes.block:  # blocks hold nothing and only count tokens
        num_blocks = -(-longest // config.block_size)
        return max(num_blocks, min(num_blocks * config.num_seqs, MOST_COUNTED)), states
    taken = 0 if states is None else sum(states) * sizes.state
    pool_bytes = config.kv_cache_bytes or (default - taken)
    return pool_bytes // sizes.block, states


def fit_states(row_bytes: int, config: EngineConfig, most: int, default: int) -> StateRows | None:
    """Divide memory among the states of running sequences and snapshots. Raises ConfigError if none fits.

    row_bytes: of one state; 0 if the model keeps none. most, default: as in `divide_pool`.
    """
    if not row_bytes:
        return None
    wanted = config.num_seqs * (2 if config.enable_prefix_caching else 1)
    room = default // 2
    if config.kv_cache_bytes is not None:
        room = min(default, most - config.kv_cache_bytes)
    num_rows = min(wanted, room // row_bytes)
    if num_rows < 1:
        raise ConfigError(
            f"the state of one sequence takes {row_bytes} bytes beside the KV pool, more than is left; lower "
            "kv_cache_bytes, or raise memory_utilization (or free memory)"
        )
    num_seqs = min(
        config.num_seqs, -(-num_rows * 3 // 4) if config.enable_prefix_caching else num_rows
    )
    return StateRows(num_seqs, num_rows - num_seqs)


def fit_pool(num_blocks: int, config: EngineConfig, model_len: int) -> int:
    """Return max_model_len: as configured, or what model and pool allow. Raises ConfigError if it does not fit."""
    pool_tokens = num_blocks * config.block_size
    wanted = config.max_model_len
    if wanted is not None and wanted > model_len:
        raise ConfigError(
            f"max_model_len={wanted} is more than the model's {model_len} positions; lower it"
        )
    if pool_tokens < 2 or (wanted is not None and wanted > pool_tokens):
        raise ConfigError(
            f"the KV pool holds {num_blocks} blocks, {pool_tokens} tokens, too few for one sequence of "
            f"{wanted or 'any'} tokens; raise kv_cache_bytes or memory_utilization (or free memory) or "
            "lower max_model_len"
        )
    return wanted or min(model_len, coarse_length(pool_tokens))


def coarse_length(num_tokens: int) -> int:
    """Round a length down to its four highest binary digits.

    A pool's size depends on the memory that is free at the start, so it differs a little between workers and between
    restarts. Without rounding, their lengths would differ by a few tokens, and they could not share a run.
    """
    step = 1 << max(0, num_tokens.bit_length() - 4)
    return num_tokens - num_tokens % step
