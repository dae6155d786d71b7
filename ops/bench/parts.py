"""Where an engine's seconds go: processor time of all threads by the engine's file that asks for it."""

import cProfile
import pstats
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2] / "engine"
LAUNCHER = "cpu_kernels/kernel.py"  # whose seconds are its callers', as a library's are
CALLS_DEEP = 20  # of libraries between a file of the engine and what takes the time
LEAST = 0.01  # of the whole: files below it are one part


def seconds_by_part(call: Callable[[], object]) -> dict[str, float]:
    """Run it; return processor seconds by file, the most first. A library's are those of the file that called it.

    Python's calls take longer while they are counted, so these are shares of a run, and not its speed.
    """
    profile = cProfile.Profile(time.process_time)
    profile.runcall(call)
    stats = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    left = {function: own for function, (_, _, own, _, _) in stats.items()}
    found = Counter[str]()
    for _ in range(CALLS_DEEP):
        above = Counter[tuple[str, int, str]]()
        for function, seconds in left.items():
            name, callers = function[0].removeprefix(f"{ROOT}/"), stats[function][4]
            if name not in (function[0], LAUNCHER):
                found[name] += seconds
            elif total := sum(edge[3] for edge in callers.values()):
                for caller, edge in callers.items():
                    above[caller] += seconds * edge[3] / total
        left = above
    least = LEAST * found.total()
    parts = {name: seconds for name, seconds in found.most_common() if seconds >= least}
    return {**parts, "other": found.total() - sum(parts.values())}
