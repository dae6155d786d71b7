"""Sets torch's number of threads on a CPU to the number of processors that other processes leave free.

A matrix product is cut into one part for each thread and waits for the slowest. So a processor that is shared
with another process delays all of them, and fewer threads are done sooner.
"""

import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

PROC = Path("/proc")
ROOT = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Cgroup:
    """A cgroup's folder, and its version, 1 or 2, on which the files' names depend."""

    folder: Path
    version: int

    def read(self, name: str) -> str:
        """Read a file of the cgroup; return "" if there is no such file."""
        try:
            return (self.folder / name).read_text().strip()
        except OSError:
            return ""


def cgroups_of(controller: str, proc: Path = PROC, root: Path = ROOT) -> Iterator[Cgroup]:
    """List the cgroups in which a controller, such as "memory", may limit this process, innermost first.

    There are none outside Linux. The paths are parameters for tests.
    """
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        # in version 2 no controllers are listed, and all groups lie in one tree
        base, version = (root / controller, 1) if controllers else (root, 2)
        group = base / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder.is_relative_to(base):
                yield Cgroup(folder, version)


INTERVAL_S = 1.0
# A thread is added if most of a processor is free for it, and ends if less than half is.
ADDED_AT = 0.7
KEPT_AT = 0.5

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ProcessorTime:
    """Seconds up to now. passed: by the clock.  own: computed by this process.  idle: of its processors, added up."""

    passed: float
    own: float
    idle: float
    processors: frozenset[str] = frozenset()


class CpuThreads:
    """Sets torch's number of threads, for the whole process, between 1 and the number it finds.

    read_time: reads the processors' times; where it returns None, the number of threads stays.
    """

    def __init__(self, read_time: Callable[[], ProcessorTime | None] | None = None) -> None:
        self._read_time = read_time or read_processor_time
        self._most = self._current = torch.get_num_threads()
        self._before = self._read_time()
        self._quota = read_processor_quota()
        logger.info(
            "CPU threads: at most %d, fewer while other processes use the processors", self._most
        )

    def adapt(self) -> None:
        """About once a second, set the threads by the processors that were free and the limits of cgroups."""
        if self._before is None or time.monotonic() - self._before.passed < INTERVAL_S:
            return
        now = self._read_time()
        before = self._before
        self._before = now
        if now is None or now.processors != before.processors:
            return
        # the processors that this process used were free for it, as idle ones were
        free = (now.own - before.own + now.idle - before.idle) / (now.passed - before.passed)
        wanted = choose_threads(min(free, self._quota), self._current, self._most)
        if wanted != self._current:
            logger.debug(
                "%.1f processors are free: %d threads instead of %d", free, wanted, self._current
            )
            torch.set_num_threads(wanted)
            self._current = wanted


def choose_threads(free: float, current: int, most: int) -> int:
    """Return how many threads to use, 1 to `most`, if `current` are used and `free` processors are free."""
    num_kept = min(current, int(free + 1 - KEPT_AT))
    num_started = int(free + 1 - ADDED_AT)
    return min(most, max(1, num_kept, num_started))


def read_processor_quota(proc: Path = PROC, cgroup_root: Path = ROOT) -> float:
    """Return how many processors the cgroups allow this process; infinity without a limit."""
    quotas = [math.inf]
    for group in cgroups_of("cpu", proc, cgroup_root):
        if group.version == 1:
            numbers = [group.read("cpu.cfs_quota_us"), group.read("cpu.cfs_period_us")]
        else:
            numbers = group.read("cpu.max").split()
        if len(numbers) == 2 and all(map(str.isdigit, numbers)):  # not "max", nor -1
            quotas.append(int(numbers[0]) / int(numbers[1]))
    return min(quotas)


def read_processor_time(proc: Path = PROC) -> ProcessorTime | None:
    """Read the processors' times; None outside Linux. Source: proc_stat(5)."""
    try:
        lines = (proc / "stat").read_text().splitlines()
        ticks = os.sysconf("SC_CLK_TCK")
        allowed = frozenset(f"cpu{number}" for number in os.sched_getaffinity(0))
    except (OSError, AttributeError, ValueError):
        return None
    rows = [fields for fields in map(str.split, lines) if fields and fields[0] in allowed]
    idle = sum(int(fields[4]) + int(fields[5]) for fields in rows)  # idle, and waiting for disks
    return (
        ProcessorTime(time.monotonic(), time.process_time(), idle / ticks, allowed)
        if rows
        else None
    )
