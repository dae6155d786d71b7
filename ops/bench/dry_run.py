"""How near `tokenmill submit --dry-run` comes to the run: tokens and time on three skewed files.

    python -m ops.bench.make --models q54m
    python -m ops.bench.dry_run --model ops/out/bench/q54m --rows 600

One worker for the dry run and a fresh one for the run, nothing beside them that is ours. Few rows have long
prompts; few prompts are most of the rows; few rows may write fifty times as much as the others. The run's
time is its manifest's, from the first shard's start to the last one's end.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from redis import Redis

from jobs.runs.control import submit_run
from jobs.runs.dry_run import Estimate, estimate
from jobs.runs.trials import Trial, try_job, try_jobs
from ops.bench.report import print_machine
from tests.redis_server import running_redis_server

QUEUE = "bulk"
WORDS = (
    "the",
    "of",
    "and",
    "to",
    "in",
    "is",
    "that",
    "for",
    "it",
    "as",
    "was",
    "with",
    "be",
    "by",
    "on",
    "not",
)

File = Callable[[random.Random, int], tuple[dict[str, Any], dict[str, Any]]]


def long_prompts(rng: random.Random, rows: int) -> tuple[dict[str, Any], dict[str, Any]]:
    lengths = [min(300, int(rng.lognormvariate(2.5, 1.1)) + 1) for _ in range(rows)]
    return {"prompt": [_text(rng, each) for each in lengths]}, {"max_tokens": 16}


def repeated_prompts(rng: random.Random, rows: int) -> tuple[dict[str, Any], dict[str, Any]]:
    texts = [_text(rng, rng.randint(5, 60)) for _ in range(rows // 3)]
    places = [min(len(texts), int(rng.paretovariate(0.5))) - 1 for _ in range(rows)]
    return {"prompt": [texts[place] for place in places]}, {"max_tokens": 24, "temperature": 0}


def long_answers(rng: random.Random, rows: int) -> tuple[dict[str, Any], dict[str, Any]]:
    limits = [200 if rng.random() < 0.03 else rng.randint(1, 8) for _ in range(rows)]
    return {"prompt": [_text(rng, 12) for _ in limits], "limit": limits}, {}


FILES: Sequence[File] = (long_prompts, repeated_prompts, long_answers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--rows", type=int, default=600)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    print_machine()
    with running_redis_server() as url, tempfile.TemporaryDirectory() as folder, Redis.from_url(url) as redis:
        start = partial(_worker, args.model, args.threads, url, folder)
        print(f"{'file':18} {'':14} {'estimated':>12} {'run':>12} {'off by':>8}")
        for number, make in enumerate(FILES):
            _compare(redis, Path(folder) / str(number), make, args.rows, start)


def _compare(
    redis: Redis, folder: Path, make: File, rows: int, start: Callable[[], subprocess.Popen[bytes]]
) -> None:
    folder.mkdir()
    columns, sampling = make(random.Random(1), rows)
    pq.write_table(pa.table(columns), folder / "in.parquet")
    own = {"sampling_columns": {"max_tokens": "limit"}} if "limit" in columns else {}
    arguments: dict[str, Any] = {"sampling": {**sampling, "ignore_eos": True}, **own}
    source = str(folder / "in.parquet")
    with _listening(redis, start):
        told = _told(redis, {"input": source, **arguments})
    with _listening(redis, start):  # another, whose prefix cache holds nothing yet
        submit_run(redis, QUEUE, input=source, output=str(folder / "out"), **arguments)
        while not (folder / "out" / "_SUCCESS").exists():
            time.sleep(0.1)
    ran = json.loads((folder / "out" / "_manifest.json").read_text())
    _print(make.__name__, "prompt tokens", told.prompt_tokens, ran["prompt_tokens"])
    _print("", "answer tokens", told.completion_tokens, ran["completion_tokens"])
    _print("", "seconds", told.seconds, ran["seconds"])


def _told(redis: Redis, arguments: dict[str, Any]) -> Estimate:
    survey = try_job(redis, QUEUE, Trial("jobs.survey_parquet", arguments))
    return estimate(survey, partial(try_jobs, redis, QUEUE))


@contextmanager
def _listening(redis: Redis, start: Callable[[], subprocess.Popen[bytes]]) -> Iterator[None]:
    worker = start()
    try:
        while not redis.scard(f"rq:workers:{QUEUE}"):
            time.sleep(0.1)
        yield
    finally:
        worker.terminate()
        worker.wait()


def _print(name: str, what: str, told: float, ran: float) -> None:
    print(f"{name:18} {what:14} {told:>12,.1f} {ran:>12,.1f} {told / ran - 1:>8.1%}", flush=True)


def _worker(model: str, threads: int, url: str, folder: str) -> subprocess.Popen[bytes]:
    settings = {
        "TOKENMILL_MODEL": str(Path(model).resolve()),
        "TOKENMILL_DATA_ROOTS": folder,
        "TOKENMILL_TORCH_THREADS": str(threads),
        "TOKENMILL_KV_CACHE_BYTES": str(1 << 28),
    }
    command = [
        *(sys.executable, "-m", "rq.cli", "worker", "--worker-class", "worker.BatchWorker", "-S", "json"),
        *("--url", url, QUEUE),
    ]
    log = (Path(folder) / "worker.log").open("wb")
    return subprocess.Popen(command, env={**os.environ, **settings}, stdout=log, stderr=log)


def _text(rng: random.Random, words: int) -> str:
    return " ".join(rng.choices(WORDS, k=words))


if __name__ == "__main__":
    main()
