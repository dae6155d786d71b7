"""Runs in an object store under kills and faults of the store: `python -m ops.s3_faults`.

Two workers work through a proxy on a real HTTP server of the S3 protocol (moto's). One of them is killed
again and again, at random moments and at each step that touches files; requests fail at random (503, cut
replies, lost replies, slow ones), and at times everything does for seconds (503, expired credentials). Then
every row is looked for in the parts. Needs the test suite's dependencies and a Redis server's executable, and
runs from the repository's root.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir

from tests.faults.harness import harness
from tests.faults.store_faults import Moments, kills_in_a_store
from tests.jobs.s3_server import FaultyProxy, running_s3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=10, help="SIGKILLs of workers")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--share", type=float, default=0.03, help="of requests that fail")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no process is left behind
    evidence = Path(gettempdir()) / f"tokenmill-s3-faults-{options.seed}"
    with (
        TemporaryDirectory(prefix="f") as folder,
        harness(Path(folder), options.seed, evidence) as faults,
        running_s3() as s3,
    ):
        proxy, moments = FaultyProxy(s3.url), Moments(random.Random(options.seed), options.share)
        print(f"seed {options.seed}", flush=True)
        started = time.monotonic()
        found = kills_in_a_store(faults, s3, proxy, moments, options.kills)
        print(*(f"{count:6d}  {kind}" for kind, count in sorted(faults.faults.items())), sep="\n")
        print(*(f"{count:6d}  requests: {kind}" for kind, count in sorted(moments.seen.items())), sep="\n")
        print(
            f"{proxy.requests:6d}  requests in all, {time.monotonic() - started:.0f} s\n{found}", flush=True
        )
        if not found.is_clean:
            evidence.mkdir(parents=True, exist_ok=True)
            for log in (Path(folder) / "logs").iterdir():
                (evidence / log.name).write_bytes(log.read_bytes())
            print(f"logs are in {evidence}", flush=True)
        proxy.close()
    return 0 if found.is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
