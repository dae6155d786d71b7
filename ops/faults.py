"""Thousands of faults under real workers, with an audit after each scenario: `python -m ops.faults`.

Needs the test suite's dependencies and a Redis server's executable, and runs from the repository's root.
Full disks are small tmpfs mounts and need the right to mount; elsewhere they are left out.
"""

import argparse
import signal
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir

from tests.faults.harness import harness
from tests.faults.scenarios import SCENARIOS, one_of_each

MEMORY = Path("/dev/shm")
"""A killed server or worker loses nothing that it has written there either, and waits for no disk."""


def main() -> int:
    """Run rounds of every scenario until the kills or the minutes are reached; print the table after each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=2000, help="SIGKILLs of workers")
    parser.add_argument(
        "--minutes", type=float, default=60.0, help="start no new round after this time"
    )
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--only", choices=SCENARIOS, help="one scenario again and again")
    parser.add_argument("--count", type=int, default=20, help="faults in each turn of --only")
    parser.add_argument(
        "--secure", action="store_true", help="workers come over TLS, as ops/redis-users.acl's user"
    )
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, _leave)
    evidence = Path(gettempdir()) / f"tokenmill-faults-{options.seed}"
    started, longest_s = time.monotonic(), 0.0
    place = MEMORY if MEMORY.is_dir() else None
    with (
        TemporaryDirectory(prefix="f", dir=place) as folder,
        harness(Path(folder), options.seed, evidence, options.secure) as faults,
    ):
        print(f"seed {options.seed}", flush=True)
        while faults.is_clean() and (left := options.kills - faults.num_kills) > 0:
            round_started = time.monotonic()
            refused: list[str] = []
            if options.only:
                SCENARIOS[options.only](faults, options.count)
            else:
                refused = one_of_each(faults, min(left, 400))
            now = time.monotonic()
            longest_s = max(longest_s, now - round_started)
            print(faults.table(), *refused, f"{now - started:.0f} s so far\n", sep="\n", flush=True)
            if now - started + longest_s > options.minutes * 60:
                break
        if not faults.is_clean():
            print(f"logs and Redis' contents are in {evidence}", flush=True)
        return 0 if faults.is_clean() else 1


def _leave(*_: object) -> None:
    """Leave no process and no mount behind: a second signal, as `timeout` sends, must not cut that short."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(1)


if __name__ == "__main__":
    sys.exit(main())
