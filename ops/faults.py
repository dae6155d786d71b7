"""Thousands of faults under real workers, with an audit after each scenario: `python -m ops.faults`.

Needs the test suite's dependencies and a Redis server's executable, and runs from the repository's root.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.faults.harness import harness


def main() -> int:
    """Run rounds of every scenario until the kills or the minutes are reached; print the table after each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=2000, help="SIGKILLs of workers")
    parser.add_argument("--minutes", type=float, default=60.0, help="start no new round after this time")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no process is left behind
    started, longest_s = time.monotonic(), 0.0
    with TemporaryDirectory(prefix="f") as folder, harness(Path(folder), options.seed) as faults:
        print(f"seed {options.seed}", flush=True)
        while faults.is_clean() and (left := options.kills - faults.num_kills) > 0:
            round_started = time.monotonic()
            faults.one_of_each(min(left, 400))
            longest_s = max(longest_s, time.monotonic() - round_started)
            print(f"{faults.table()}\n", flush=True)
            if time.monotonic() - started + longest_s > options.minutes * 60:
                break
        return 0 if faults.is_clean() else 1


if __name__ == "__main__":
    sys.exit(main())
