"""What was asked of the workers, and the audit that compares it with what was delivered."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from redis import Redis
from rq import Callback, Queue, Retry
from rq.job import Dependency, Job
from rq.serializers import JSONSerializer

from tests.rq_workers import leftovers

F = "tests.worker.functions."
QUEUES = ("high", "bulk")
ROWS, ROWS_PER_SHARD = 300, 12


@dataclass
class Findings:
    """Counts over audits. lost: jobs or rows without an end, or with a wrong one. doubled: with two.
    orphaned: entries and files that nobody will remove."""

    jobs: int = 0
    rows: int = 0
    lost: int = 0
    doubled: int = 0
    orphaned: int = 0
    details: list[str] = field(default_factory=list)

    def add(self, other: Findings) -> None:
        """Sum up."""
        for name in ("jobs", "rows", "lost", "doubled", "orphaned"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.details += other.details


class Ledger:
    """Asks for jobs of every kind and for Parquet runs, and knows how each must end."""

    def __init__(self, redis: Redis, folder: Path, rng: random.Random) -> None:
        self._redis, self._folder, self._rng = redis, folder, rng
        self._expected: dict[str, str] = {}
        self._runs: list[Path] = []
        self._planning: dict[Path, str] = {}
        self._count = self._num_runs = 0
        self._source = folder / "in.parquet"
        rows = {"id": list(range(ROWS)), "prompt": [f"row {i}" for i in range(ROWS)]}
        pq.write_table(pa.table(rows), self._source, row_group_size=70)

    def backlog(self) -> int:
        """Jobs that wait."""
        return sum(self._redis.llen(f"rq:queue:{name}") for name in QUEUES)

    def ask_jobs(self, count: int) -> None:
        """Enqueue jobs: one of each kind after the other, on both queues."""
        for _ in range(count):
            self._count += 1
            number, name = self._count, self._rng.choice(QUEUES)
            self._ask(number, Queue(name, connection=self._redis, serializer=JSONSerializer))

    def _ask(self, number: int, queue: Queue) -> None:
        prompt, kind = f"prompt {number}", number % 10
        expected = f"echo:{prompt}"
        arguments: tuple[Any, ...] = ("jobs.complete", prompt)
        tokens: dict[str, Any] = {"max_tokens": 1 + number % 6}
        if kind in (1, 2):
            arguments, expected = ("jobs.complete", "refuse"), "failed"
        if kind == 3:
            arguments, tokens, expected = (F + "ask_for_retry", 1), {}, "done"
        if kind == 4:
            arguments, tokens, expected = (F + "add", number, 1), {}, str(number + 1)
        options: dict[str, Any] = {"result_ttl": -1, "failure_ttl": -1, "timeout": -1}
        if kind in (1, 5):
            options["retry"] = Retry(max=2)
        if kind in (2, 6):
            options |= {"on_failure": Callback(F + "ignore"), "on_success": Callback(F + "ignore")}
        job = queue.create_job(*arguments[:1], arguments[1:], tokens, **options)
        self._expected[job.id] = expected
        if kind in (2, 7, 8):  # before its parent: RQ forgets a child that comes after it has failed
            self._ask_child(job, queue, f"after {number}")
        queue.enqueue_job(job)

    def _ask_child(self, parent: Job, queue: Queue, prompt: str) -> None:
        parent.save()
        after = Dependency([parent], allow_failure=True)
        child = queue.enqueue("jobs.complete", prompt, depends_on=after, result_ttl=-1, job_timeout=-1)
        self._expected[child.id] = f"echo:{prompt}"

    def ask_run(self, rows_per_shard: int = ROWS_PER_SHARD) -> None:
        """Enqueue the planning of a Parquet run into a new folder."""
        self._num_runs += 1
        self._runs.append(self._folder / f"out-{self._num_runs}")
        self._plan(self._runs[-1], rows_per_shard)

    def parts_written(self) -> int:
        """Finished parts of the runs on this page."""
        return sum(len(list(run.glob("part-*"))) for run in self._runs)

    def _plan(self, output: Path, rows_per_shard: int = ROWS_PER_SHARD) -> None:
        queue = Queue("bulk", connection=self._redis, serializer=JSONSerializer)
        job = queue.enqueue(
            "jobs.score_parquet",
            str(self._source),
            str(output),
            sampling={"max_tokens": 2},
            rows_per_shard=rows_per_shard,
            job_timeout=-1,
        )
        self._planning[output] = job.id

    def resume_failed_runs(self) -> int:
        """Submit again what a full disk has failed, as its owner would; return how many runs those were."""
        ids = {job_id.decode() for job_id in self._redis.zrange("rq:failed:bulk", 0, -1)}
        failed = {job_id.rpartition("-")[0] for job_id in ids}
        unfinished = [run for run in self._runs if not (run / "_SUCCESS").exists()]
        again = [run for run in unfinished if self._planning[run] in ids or _run_id(run) in failed]
        for run in again:
            self._plan(run)
        return len(again)

    def all_ended(self) -> bool:
        """Whether every job has an end and every run its mark; orphans are the audit's."""
        if self.backlog() or leftovers(self._redis, *QUEUES):
            return False
        if not all((run / "_SUCCESS").exists() for run in self._runs):
            return False
        with self._redis.pipeline(transaction=False) as pipe:
            for job_id in self._expected:
                pipe.hget(Job.key_for(job_id), "status")
            return all(status in (b"finished", b"failed") for status in pipe.execute())

    def audit(self) -> Findings:
        """Compare everything asked since the last audit with what was delivered; start a new page."""
        found = Findings()
        self._audit_jobs(found)
        for run in self._runs:
            self._audit_run(run, found)
        orphans = leftovers(self._redis, *QUEUES)
        found.orphaned += len(orphans)
        found.details += [f"orphan {orphan}" for orphan in orphans]
        self._expected.clear()
        self._runs = []
        return found

    def _audit_jobs(self, found: Findings) -> None:
        ended: Counter[str] = Counter()
        for name in QUEUES:
            for registry in ("finished", "failed"):
                ended.update(i.decode() for i in self._redis.zrange(f"rq:{registry}:{name}", 0, -1))
        for job_id, expected in self._expected.items():
            found.jobs += 1
            job = Job.fetch(job_id, connection=self._redis, serializer=JSONSerializer)
            ends = [result for result in job.results() if result.type.name in ("SUCCESSFUL", "FAILED")]
            if len(ends) > 1 or ended[job_id] > 1:
                found.doubled += 1
                found.details.append(f"doubled {job_id} ({expected}): {len(ends)} ends, {job.get_status()}")
            elif len(ends) < 1 or ended[job_id] < 1 or _answer(ends[0]) != expected:
                found.lost += 1
                why = [(result.exc_string or "").strip()[-200:] for result in ends]
                found.details.append(f"lost {job_id} ({expected}): {job.get_status()}, {why}")

    def _audit_run(self, run: Path, found: Findings) -> None:
        found.rows += ROWS
        found.orphaned += len(list(run.glob("_tmp.*")))
        if not (run / "_SUCCESS").exists():
            found.lost += ROWS
            found.details.append(f"run {run.name} has not ended")
            return
        table = pq.read_table(run, columns=["id", "completion"]).to_pydict()
        times = Counter(table["id"])
        found.lost += sum(times[i] == 0 for i in range(ROWS))
        found.doubled += sum(count - 1 for count in times.values())
        wrong = sum(text != f"echo:row {i}" for i, text in zip(table["id"], table["completion"], strict=True))
        found.lost += wrong
        if json.loads((run / "_manifest.json").read_text())["rows"] != ROWS:
            found.details.append(f"the manifest of {run.name} counts other rows")
            found.lost += 1


def _run_id(run: Path) -> str | None:
    plan = run / "_plan.json"
    return str(json.loads(plan.read_text())["run"]) if plan.exists() else None


def _answer(result: object) -> str:
    value = getattr(result, "return_value", None)
    if isinstance(value, dict):
        return str(value["choices"][0]["text"])
    return "failed" if getattr(result, "exc_string", None) else str(value)
