"""Jobs and files that are made to stop or starve others: each with a producer's rights alone."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq

from ops.load.site import MIB, Site

LANE = "bulk"
"""Where the attacks are queued."""

HUGE = (2**31, 2**63, 2**64, -(2**63) - 1, 10**30)
SAMPLING = ("top_k", "max_tokens", "min_tokens", "seed", "temperature", "n")

LONGEST_CHARS = 200_000
"""Of a prompt that the bench's model might hold: 32,768 tokens of at most 8 bytes."""

Launch = Callable[[], None]


@dataclass(frozen=True)
class Attack:
    """prepare: makes files and payloads, of a share of their full size, and returns what queues the jobs.
    lane: of the prompts that are watched meanwhile."""

    name: str
    prepare: Callable[[Site, float], Launch]
    lane: str = "high"


def give_text(size: int) -> str:
    """A user's function whose result has `size` bytes."""
    return "x" * size


def huge_integers(place: Site, _: float) -> Launch:
    source = place.folder / "plain.parquet"
    pq.write_table(pa.table({"prompt": ["a", "b"]}), source)

    def launch() -> None:
        for number, (name, value) in enumerate((name, value) for name in SAMPLING for value in HUGE):
            place.queue(LANE).enqueue("jobs.complete", "x", **{name: value})
            if number % len(HUGE) == 1:
                _score(place, source, sampling={name: value})

    return launch


def payloads(place: Site, scale: float) -> Launch:
    lists = b'["jobs.complete",null,[[' + b"[]," * int(21_000_000 * scale) + b"[]]],{}]"
    blanks = b'["jobs.complete",null,["x"],{}]' + b" " * int(60 * MIB * scale)
    packed = [zlib.compress(lists), *[zlib.compress(blanks)] * max(1, int(60 * scale))]

    def launch() -> None:
        for payload in packed:
            _enqueue_raw(place, payload)

    return launch


def parquet_bombs(place: Site, scale: float) -> Launch:
    rows, large = max(10, int(1000 * scale)), "x" * MIB
    small = pa.array(["a"] * 3 * rows)
    tables = {
        "dictionary": (pa.table({"prompt": _repeated(large, rows)}), 1000),
        "wide-shard": (pa.table({"prompt": _repeated(large, 4 * rows)}), 4000),
        "cell": (pa.table({"prompt": ["x" * int(1000 * MIB * scale)]}), 1000),
        "other-column": (pa.table({"prompt": small, "other": _repeated(large, 3 * rows)}), 3000),
    }
    for name, (table, _) in tables.items():
        # Without Arrow's schema the file says nothing of dictionaries: its reader gets each value in full.
        # A dictionary's page is cut at 1 MiB unless told otherwise, and the rest written value by value.
        options = {"store_schema": False, "compression": "zstd", "write_statistics": False}
        options |= {"dictionary_pagesize_limit": 1 << 30, "use_dictionary": name != "cell"}
        pq.write_table(table, place.folder / f"{name}.parquet", **options)
    shards = [(name, rows_per_shard) for name, (_, rows_per_shard) in tables.items()]

    def launch() -> None:
        for name, rows_per_shard in shards:
            _score(place, place.folder / f"{name}.parquet", rows_per_shard=rows_per_shard)

    return launch


def long_prompts(place: Site, scale: float) -> Launch:
    """40 prompts of 1 MiB, and nearly as much in prompts that no length tells to be too long."""
    rng = Random(4)
    prompts = ["".join(rng.choices("abcdefghij ", k=MIB)) for _ in range(max(2, int(40 * scale)))]
    jobs = max(1, int(11 * scale))
    many = [
        "".join(rng.choices("abcdefghij ", k=LONGEST_CHARS))
        for _ in range(max(1, int(18 * jobs * scale**0.5)))
    ]

    def launch() -> None:
        place.queue(LANE).enqueue("jobs.complete", prompts, max_tokens=1)
        for prompt in prompts:
            place.queue(LANE).enqueue("jobs.complete", prompt, max_tokens=1)
        for number in range(jobs):
            place.queue(LANE).enqueue("jobs.complete", many[number::jobs], max_tokens=1)

    return launch


def slow_planning(place: Site, scale: float) -> Launch:
    deep = place.folder / "deep"
    folder = deep / "/".join(["d"] * max(20, int(600 * scale)))
    folder.mkdir(parents=True)
    pq.write_table(pa.table({"prompt": ["a"]}), folder / "in.parquet")
    pieces = place.folder / "pieces.parquet"
    pq.write_table(pa.table({"a": ["x"] * max(10, int(2000 * scale))}), pieces)
    os.mkfifo(place.folder / "slow.parquet")

    def launch() -> None:
        _score(place, Path(f"{deep}/**/d/**/d/**/*.parquet"))
        _score(place, pieces, template="{a}" * int(87_000 * scale))
        _score(place, place.folder / "slow.parquet")

    return launch


def large_results(place: Site, _: float) -> Launch:
    place.redis.config_set("proto-max-bulk-len", MIB)

    def launch() -> None:
        for _ in range(3):
            place.queue(LANE).enqueue(f"{__name__}.give_text", 2 * MIB)

    return launch


ATTACKS = (
    Attack("1 huge integers", huge_integers),
    Attack("2 payloads", payloads),
    Attack("3 Parquet bombs", parquet_bombs),
    Attack("4 long prompts", long_prompts),
    Attack("5 slow planning", slow_planning, lane=LANE),
    Attack("6 large results", large_results),
)


def _score(place: Site, source: Path, **arguments: object) -> None:
    output = place.folder / f"out-{uuid4().hex}"
    options = {"sampling": {"max_tokens": 1}, **arguments}
    place.queue(LANE).enqueue("jobs.score_parquet", str(source), str(output), **options)


def _repeated(text: str, rows: int) -> pa.Array:
    """A text in many rows, which takes one of them in a file."""
    return pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), pa.array([text]))


def _enqueue_raw(place: Site, payload: bytes) -> None:
    """Queue a job whose payload RQ's own client would not write."""
    queue = place.queue(LANE)
    job = queue.create_job("jobs.complete", args=("x",))
    job.save()
    place.redis.hset(job.key, mapping={"data": payload, "status": "queued"})
    queue.push_job_id(job.id)
