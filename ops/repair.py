"""A model that fails a check six times in ten, and a worker that is killed: `python -m ops.repair`.

Rows are scored by real workers with the demo model, drawn with a seed, and checked by a function
that hashes their text. Once undisturbed, once with workers that are killed while they are at it, and once
undisturbed in batches of another size: all must give the same rows, each valid or with all its attempts used.
Then it tells which share of the prompts' tokens of further attempts came from the prefix cache.

With `--dtype bfloat16` and without `--deterministic` rows may differ, as other chunks or another prefix hit
round otherwise: then the last of these runs says how many do so without a kill.

Needs the test suite's dependencies and a Redis server's executable, and runs from the repository's root.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from subprocess import Popen
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ops.repair_check import check
from tests.e2e.conftest import RealWorkers
from tests.redis_server import running_redis_server
from tests.rq_workers import wait_until

#: The least share of further attempts' prompts that must be in the cache.
LEAST_CACHED = 0.9

#: Sequences in a batch of the run whose batches are others; else they are 16.
OTHER_NUM_SEQS = 5

#: Seconds that a run may take.
LONGEST_S = 600

#: What must be the same however a run was disturbed.
COLUMNS = ("id", "completion", "attempts", "check_error", "finish_reason", "prompt_tokens", "error")

WORDS = ("river", "stone", "amber", "quiet", "lantern", "morning", "copper", "window", "garden", "silver")


def prompts_of(rows: int, words: int, seed: int) -> list[str]:
    """Return texts that share no beginning."""
    drawn = random.Random(seed)
    return [f"{number} {' '.join(drawn.choices(WORDS, k=words))}" for number in range(rows)]


def problems(rows: Sequence[Mapping[str, Any]], max_attempts: int) -> list[str]:
    """Say which rows are neither valid nor tried as often as may be."""
    found = []
    for row in rows:
        reason = check(row, row["completion"] or "")
        is_right = row["check_error"] == reason and (reason is None or row["attempts"] == max_attempts)
        if row["error"] is not None or not is_right:
            found.append(f"row {row['id']}: { ({name: row[name] for name in COLUMNS}) }")
    return found


class _Runs:
    def __init__(self, workers: RealWorkers, folder: Path, options: argparse.Namespace) -> None:
        self._workers, self._folder, self._options = workers, folder, options
        self._source = folder / "in.parquet"
        texts = prompts_of(options.rows, options.words, options.seed)
        pq.write_table(pa.table({"id": range(options.rows), "prompt": texts}), self._source)

    def score(
        self, name: str, max_attempts: int, kills: int = 0, max_num_seqs: int = 16
    ) -> tuple[list[dict[str, Any]], int]:
        """Score the rows into a folder with one worker at a time, of which so many are killed at most.

        Returns the rows, and how many were killed.
        """
        output, options = self._folder / name, self._options
        worker, killed = self._start(max_num_seqs), 0
        job = self._workers.queue("bulk").enqueue(
            "jobs.score_parquet",
            str(self._source),
            str(output),
            sampling={"temperature": 1.5, "max_tokens": options.max_tokens, "seed": options.seed},
            rows_per_shard=options.rows_per_shard,
            check={"function": "ops.repair_check.check"},
            check_columns=["id"],
            max_attempts=max_attempts,
            repair_template=" {reason}: ",
        )
        self._workers.result(job)
        while killed < kills:
            parts = _num_parts(output)
            wait_until(partial(_has_more, output, parts), LONGEST_S)
            if (output / "_SUCCESS").exists():
                break
            worker.kill()
            worker.wait()
            worker, killed = self._start(max_num_seqs), killed + 1
        wait_until((output / "_SUCCESS").exists, LONGEST_S)
        worker.terminate()
        worker.wait()
        rows: list[dict[str, Any]] = pq.read_table(output).to_pylist()
        return rows, killed

    def _start(self, max_num_seqs: int) -> Popen[str]:
        return self._workers.start(
            queues=("bulk",),
            TOKENMILL_ALLOWED_FUNCTIONS="ops.repair_check.check",
            TOKENMILL_MAX_WORKER_DEATHS="1000",
            TOKENMILL_MAX_NUM_SEQS=str(max_num_seqs),
            TOKENMILL_DTYPE=self._options.dtype,
            TOKENMILL_DETERMINISTIC=str(self._options.deterministic).lower(),
        )


def _num_parts(output: Path) -> int:
    return len(list(output.glob("part-*.parquet")))


def _has_more(output: Path, parts: int) -> bool:
    return _num_parts(output) > parts or (output / "_SUCCESS").exists()


def differences(rows: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]]) -> list[str]:
    """Tell the rows that are not the same in both."""
    pairs = [
        [tuple(row[name] for name in COLUMNS) for row in both] for both in zip(rows, others, strict=True)
    ]
    return [f"{one}\n{other}" for one, other in pairs if one != other]


def compare(runs: _Runs, max_attempts: int, kills: int, *, may_differ: bool) -> bool:
    """Score undisturbed, disturbed, in other batches, and with one attempt each; print what was found, return
    whether it is as it must be. may_differ: rows of one run and another."""
    whole, _ = runs.score("whole", max_attempts)
    disturbed, killed = runs.score("disturbed", max_attempts, kills)
    rebatched, _ = runs.score("rebatched", max_attempts, max_num_seqs=OTHER_NUM_SEQS)
    first, _ = runs.score("first", 1)
    wrong = [each for rows in (whole, disturbed, rebatched) for each in problems(rows, max_attempts)]
    differing, in_others = differences(whole, disturbed), differences(whole, rebatched)
    invalid = sum(row["check_error"] is not None for row in whole)
    failed_first = sum(row["check_error"] is not None for row in first)
    further = _sum(whole, "prompt_tokens") - _sum(first, "prompt_tokens")
    cached = _sum(whole, "cached_tokens") - _sum(first, "cached_tokens")
    print(
        f"{len(whole)} rows, {_sum(whole, 'attempts')} attempts; {failed_first} rows failed at first, "
        f"{len(whole) - invalid} are valid, {invalid} have used {max_attempts} attempts\n"
        f"{killed} workers killed: {len(differing)} rows differ\n"
        f"none killed, batches of {OTHER_NUM_SEQS}: {len(in_others)} rows differ\n"
        f"further attempts: {cached:,} of {further:,} prompt tokens from the cache, {cached / further:.1%}",
        *wrong,
        *differing,
        *in_others,
        sep="\n",
        flush=True,
    )
    are_same = may_differ or not (differing or in_others)
    return not wrong and are_same and killed == kills and cached >= LEAST_CACHED * further


def _sum(rows: Sequence[Mapping[str, Any]], column: str) -> int:
    return sum(row[column] for row in rows)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=400)
    parser.add_argument("--rows-per-shard", type=int, default=20)
    parser.add_argument("--words", type=int, default=60, help="of a prompt")
    parser.add_argument("--max-tokens", type=int, default=12)
    parser.add_argument("--max-attempts", type=int, default=5)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--deterministic", action="store_true", help="rows must be the same in bfloat16 too")
    options = parser.parse_args()
    may_differ = options.dtype == "bfloat16" and not options.deterministic
    print(f"seed {options.seed}", flush=True)
    with TemporaryDirectory() as name, running_redis_server() as url:
        folder = Path(name).resolve()
        workers = RealWorkers(url, folder)
        try:
            is_right = compare(
                _Runs(workers, folder, options), options.max_attempts, options.kills, may_differ=may_differ
            )
        finally:
            workers.close()
            workers.redis.close()
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
