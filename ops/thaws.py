"""Freezes whoever is at a run before each of its calls to Redis and files: `python -m ops.thaws`.

Meanwhile others finish, cancel, submit or resume the run; then it thaws, and goes on or is killed a call
later. Each run must end or say why, with every row once. Needs the test suite's dependencies and a Redis
server's executable, and runs from the repository's root.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from redis import Redis

from tests.redis_server import running_redis_server
from tests.thaws.cases import ACTORS, Case, all_cases, calls_of, play, sample
from tests.thaws.store_world import StoreWorld
from tests.thaws.world import World


def main() -> int:
    """Play every case, or a sample of each actor's; print a line for each actor and each kind of failure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="actors whose name has this in it")
    parser.add_argument("--most", type=int, default=sys.maxsize, help="cases of each actor; by default all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--store", action="store_true", help="the run's files are objects")
    options = parser.parse_args()
    kind = StoreWorld if options.store else World
    logging.getLogger("redis.lock").setLevel(logging.ERROR)  # that a lock has run out is what happens here
    num_cases = num_failed = 0
    with TemporaryDirectory(prefix="f") as place, running_redis_server() as url, Redis.from_url(url) as redis:
        folders = (Path(place) / str(number) for number in itertools.count())
        for actor in (each for each in ACTORS if options.only in each.name):
            started = time.monotonic()
            calls = calls_of(actor, redis, next(folders), kind)
            cases = list(all_cases(actor, calls))
            if options.store:
                cases = [case for case in cases if not case.is_beyond_a_store(calls)]
            cases = sample(cases, options.most, options.seed)
            failures = Counter(
                told for case in cases if (told := _failure(case, calls, redis, next(folders), kind))
            )
            failed = sum(failures.values())
            seconds = time.monotonic() - started
            print(
                f"{actor}: {len(calls)} calls, {len(cases)} cases, {failed} failed, {seconds:.0f} s",
                flush=True,
            )
            for told, count in failures.most_common():
                print(f"  {count} x {told}", flush=True)
            num_cases, num_failed = num_cases + len(cases), num_failed + failed
    print(f"{num_cases} cases, {num_failed} failed")
    return 1 if num_failed else 0


def _failure(case: Case, calls: Sequence[str], redis: Redis, folder: Path, kind: type[World]) -> str | None:
    try:
        play(case, redis, folder, kind)
    except Exception as error:  # noqa: BLE001  # whatever goes wrong in a case is what is looked for
        place = calls[case.at] if case.at < len(calls) else "its end"
        return f"{case.event}, {'killed' if case.dies else 'goes on'}, at {place}: {_first_line(error)}"
    return None


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".split("\n")[0][:160]


if __name__ == "__main__":
    sys.exit(main())
