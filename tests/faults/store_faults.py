"""What hits runs in an object store: workers that die, and a store that fails, before a real server of S3."""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import dataclass, field

import pyarrow as pa
from rq import Queue
from rq.serializers import JSONSerializer

from jobs.runs.plans.names import part_shard
from tests.faults.harness import Harness
from tests.jobs.s3_server import BUCKET, S3, Fault, FaultyProxy

ROWS_PER_SHARD = 6
STUCK_S = 120.0

#: In which a store has to serve here.
FILE_TIMEOUT_S = 12

#: Steps of a worker that touch files.
STEPS = [
    "plan written",
    "shard open",
    "file opened",
    "part written",
    "part published",
    "part counted",
    "run committed",
    "manifest text",
    "manifest renamed",
    "leftover deleted",
]


class Moments:
    """A store that fails now and then, and once in a while for seconds. Seeded."""

    def __init__(self, rng: random.Random, share: float = 0.03) -> None:
        self._rng, self._share = rng, share
        self._until, self._kind = 0.0, ""
        self.seen: Counter[str] = Counter()

    def refuse(self, kind: Fault, seconds: float) -> None:
        """Let every request fail for a while."""
        self._kind, self._until = kind, time.monotonic() + seconds

    def choose(self, method: str, path: str) -> Fault | None:
        fault: Fault | None = None
        if time.monotonic() < self._until:
            fault = self._kind  # type: ignore[assignment]
        elif self._rng.random() < self._share:
            fault = self._rng.choice(("503", "cut", "lost", "slow"))
        if fault is not None:
            self.seen[fault] += 1
        return fault


@dataclass
class StoreFindings:
    """Rows of all runs: asked, delivered once, lost, doubled; and whatever else is wrong.

    left_objects: temporary ones, which readers pass by, of executions that could not remove them as the store
    refused it; the next submission does. left_uploads: those that a killed worker or a lost reply left half
    way, which the store does not show.
    """

    asked: int = 0
    delivered: int = 0
    lost: int = 0
    doubled: int = 0
    runs: int = 0
    resubmitted: int = 0
    left_objects: int = 0
    left_uploads: int = 0
    wrong: list[str] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        return not (self.lost or self.doubled or self.wrong)

    def __str__(self) -> str:
        facts = {name: value for name, value in vars(self).items() if name != "wrong"}
        return "\n".join([", ".join(f"{name} {value}" for name, value in facts.items()), *self.wrong])


def kills_in_a_store(
    faults: Harness,
    s3: S3,
    proxy: FaultyProxy,
    moments: Moments,
    kills: int,
    rows: int = 240,
    outages: bool = True,
) -> StoreFindings:
    """Run after run by two workers, of which one is killed again and again, until so many kills have fallen.

    outages: the store refuses everything for seconds in between: with 503, and with expired credentials.
    """
    found, rng = StoreFindings(), faults.rng
    proxy.choose = moments.choose
    environment = {**s3.environment(proxy.url), "TOKENMILL_FILE_TIMEOUT_S": str(FILE_TIMEOUT_S)}
    place = {"store": f"s3://{BUCKET}/data", "environment": environment}
    fallen = 0
    while fallen < kills:
        number = found.runs
        found.runs += 1
        prompts = pa.table({"id": list(range(rows)), "prompt": [f"row {n}" for n in range(rows)]})
        s3.put_rows(f"data/in{number}.parquet", prompts, row_group_size=50)
        output = f"data/out{number}"
        arguments = (f"s3://{BUCKET}/data/in{number}.parquet", f"s3://{BUCKET}/{output}")
        submit(faults, arguments)
        workers = [faults.start(**place), faults.start(faults.random_strike("kill", STEPS), **place)]
        moved, deadline = "", time.monotonic() + STUCK_S
        while f"{output}/_SUCCESS" not in s3.names(output) or busy(faults):
            victim = workers[-1]
            struck = not faults.is_alive(victim)
            if fallen < kills and (struck or rng.random() < 0.02):
                faults.end(victim)
                faults.count("SIGKILL at a step of files" if struck else "SIGKILL at any moment")
                fallen += 1
                workers[-1] = faults.start(faults.random_strike("kill", STEPS), **place)
            elif struck:
                faults.end(victim)
                workers[-1] = faults.start(**place)
            if outages and rng.random() < 0.01:
                kind: Fault = rng.choice(("503", "expired"))
                moments.refuse(kind, rng.uniform(0.5, 2.0))
                faults.count(f"the store answers {kind} for a while")
            if not busy(faults) and f"{output}/_SUCCESS" not in s3.names(output):
                submit(faults, arguments)
                found.resubmitted += 1
            if (now := str((s3.names(output), faults.num_kills))) != moved:
                moved, deadline = now, time.monotonic() + STUCK_S
            elif time.monotonic() > deadline:
                found.wrong.append(f"run {number} has not moved for {STUCK_S} s: {now[-500:]}")
                break
            time.sleep(0.05)
        for name in workers:
            faults.end_cleanly(name, (0, -15, -9))
        audit(s3, output, rows, found)
    found.left_uploads = len(s3.uploads())
    return found


def submit(faults: Harness, arguments: tuple[str, str]) -> None:
    """Submit a run, or resume it, on the queue of the harness's workers."""
    queue = Queue("bulk", connection=faults.redis, serializer=JSONSerializer)
    values = {"sampling": {"max_tokens": 1}, "rows_per_shard": ROWS_PER_SHARD}
    queue.enqueue("jobs.score_parquet", *arguments, **values, job_timeout=-1)


def busy(faults: Harness) -> bool:
    """Whether jobs wait or run."""
    queue = Queue("bulk", connection=faults.redis, serializer=JSONSerializer)
    return bool(len(queue) or faults.redis.zcard(queue.started_job_registry.key))


def audit(s3: S3, output: str, rows: int, found: StoreFindings) -> None:
    """Compare a run's parts with what was asked."""
    ids = Counter(row["id"] for row in s3.rows(output) if row["completion"] == f"echo:{row['prompt']}")
    found.asked += rows
    found.delivered += sum(1 for number in range(rows) if ids[number] == 1)
    found.lost += sum(1 for number in range(rows) if ids[number] == 0)
    found.doubled += sum(count - 1 for count in ids.values() if count > 1)
    names = [name.removeprefix(f"{output}/") for name in s3.names(output)]
    others = {name for name in names if part_shard(name) is None}
    left = {name for name in others if name.startswith("_tmp.")}
    found.left_objects += len(left)
    if others - left != {"_SUCCESS", "_manifest.json", "_plan.json", "_report.html"}:
        found.wrong.append(f"{output} holds {sorted(others)}")
