"""Hostile input by the thousand, from the tests' own strategies: `python -m ops.fuzz --cases 20000 --seed 1`.

Each case ends in a result or a named error; the first one that does not is shrunk, printed and ends the run.
Needs the test suite's dependencies and a Redis server's executable, and runs from the repository's root.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from redis import Redis

from engine.text.tokenizer import Tokenizer
from tests.fuzz.paths import ARGUMENTS, SHARDS, check_arguments, check_shard, make_tree
from tests.fuzz.payloads import CASES, check_hashes
from tests.fuzz.raw_keys import DAMAGES, running_site
from tests.fuzz.requests import CHATS, check_chat, check_sampling
from tests.fuzz.settings_values import ENVIRONMENTS, check_settings
from tests.fuzz.tables import FILES, check_file
from tests.fuzz.values import SAMPLING, WIDTHS
from tests.redis_server import running_redis_server
from tests.rq_workers import ROOT, Workers

PAYLOADS_PER_WORKER = 500
DAMAGES_PER_ROUND = 40


def main() -> int:
    """Spend the cases on all kinds of input; print each kind's number and seconds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    with TemporaryDirectory(prefix="f") as place, running_redis_server() as url, Redis.from_url(url) as redis:
        folder = Path(place)
        (folder / "files").mkdir()
        (folder / "env").mkdir()
        tokenizer, tree = Tokenizer(ROOT / "ops" / "demo" / "model"), make_tree(folder)
        kinds: dict[str, tuple[float, Any, Callable[[Any], None]]] = {
            "sampling values": (0.15, SAMPLING, check_sampling),
            "sampling values at each width": (0.1, WIDTHS, check_sampling),
            "chats": (0.1, CHATS, lambda case: check_chat(tokenizer, case)),
            "arguments of runs": (0.1, ARGUMENTS, lambda case: check_arguments(tree, case)),
            "arguments of shards": (0.05, SHARDS, lambda case: check_shard(tree, case)),
            "settings": (0.1, ENVIRONMENTS, lambda case: check_settings(folder / "env", case)),
            "Parquet files": (0.1, FILES, lambda case: check_file(redis, folder / "files", case)),
        }
        for name, (share, strategy, check) in kinds.items():
            _spend(name, int(options.cases * share), options.seed, strategy, check)
        _damage_keys(url, folder, int(options.cases * 0.1), options.seed)
        hashes: list[Any] = []
        _spend("payloads made", int(options.cases * 0.2), options.seed, CASES, hashes.append)
        started = time.monotonic()
        for start in range(0, len(hashes), PAYLOADS_PER_WORKER):
            redis.flushall()
            workers = Workers(url, folder)
            try:
                check_hashes(workers, hashes[start : start + PAYLOADS_PER_WORKER], timeout_s=300)
            finally:
                workers.close()
                workers.redis.close()
        print(f"{len(hashes):8d}  payloads run  {time.monotonic() - started:.0f} s", flush=True)
    return 0


def _damage_keys(url: str, folder: Path, cases: int, number: int) -> None:
    """Write that many cases into keys beside a live worker, scheduler and dashboard."""
    damages: list[Any] = []
    _spend("damages of keys made", cases, number, DAMAGES, damages.append)
    started = time.monotonic()
    with running_site(url, folder) as site:
        for start in range(0, len(damages), DAMAGES_PER_ROUND):
            site.spend(damages[start : start + DAMAGES_PER_ROUND])
    print(f"{len(damages):8d}  damages of keys written  {time.monotonic() - started:.0f} s", flush=True)


def _spend(name: str, cases: int, number: int, strategy: Any, check: Callable[[Any], None]) -> None:
    """Run that many cases of one kind; raises what a check raises, with the smallest case that does it."""
    started = time.monotonic()

    @seed(number)
    @settings(
        max_examples=cases,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
    )
    @given(strategy)
    def run(case: Any) -> None:
        check(case)

    run()
    print(f"{cases:8d}  {name}  {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
