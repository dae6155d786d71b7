"""How much sooner a run ends with three workers than with one: python -m ops.bench.workers.

Each worker is a process with one torch thread. With the demo's model the processors are the limit; with the
stub engine, which sleeps a stated time in each step, it is what the queue allows. Turns alternate.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from statistics import median

from ops.browse.site import Site, wait_until

STUB = "ops.load.stub_engine.StubWorker"
WORKERS = (1, 3)


def run_seconds(num_workers: int, rows: int, max_tokens: int, stub_step_s: float | None) -> float:
    """Seconds from a run's acceptance to its end, with so many workers that wait for it."""
    with tempfile.TemporaryDirectory(prefix="workers-") as folder:
        site = Site(Path(folder))
        try:
            site.start_redis()
            names = [f"node-{i}" for i in range(num_workers)]
            for name in names:
                if stub_step_s is None:
                    site.start_worker(name)
                else:
                    site.start_worker(name, STUB, STUB_STEP_S=str(stub_step_s))
            for name in names:
                site.wait_for_worker(name)
            site.submit(rows_per_shard=50, max_tokens=max_tokens, copies=rows // 2000)
            began = time.monotonic()
            wait_until((site.data / "out" / "_SUCCESS").exists, "the run ends", timeout_s=1800)
            took_s = time.monotonic() - began
            site.check_output(rows)
            return took_s
        finally:
            site.close()


def main() -> None:
    """Print the seconds of each turn, and the ratio of their medians."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--rows", type=int, default=4000, help="in thousands of two")
    parser.add_argument("--stub-step-s", type=float, default=0.02)
    parser.add_argument("--engine", choices=("both", "stub", "model"), default="both")
    options = parser.parse_args()
    engines: dict[str, float | None] = {
        f"stub, {options.stub_step_s * 1000:.0f} ms a step": options.stub_step_s,
        "the demo's model": None,
    }
    if options.engine != "both":
        wanted = options.engine == "stub"
        engines = {name: step_s for name, step_s in engines.items() if (step_s is not None) is wanted}
    for engine, step_s in engines.items():
        taken: dict[int, list[float]] = {num: [] for num in WORKERS}
        for _ in range(options.turns):
            for num in WORKERS:
                seconds = run_seconds(num, options.rows, 24, step_s)
                taken[num].append(seconds)
                load = os.getloadavg()[0]
                print(
                    f"{engine}: {num} worker(s) {seconds:.1f} s (load {load:.1f})",
                    flush=True,
                )
        one, three = (median(taken[num]) for num in WORKERS)
        print(f"{engine}: {one:.1f} s / {three:.1f} s = {one / three:.2f}", flush=True)


if __name__ == "__main__":
    main()
