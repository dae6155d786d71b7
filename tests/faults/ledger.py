"""What was asked of the workers, and the audit that compares it with what was delivered."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
from redis import Redis
from redis.client import Pipeline
from rq import Callback, Queue, Retry
from rq.job import Dependency, Job
from rq.results import Result
from rq.serializers import JSONSerializer

from jobs.common.keys import held_key
from tests.fuzz.named import NAMED
from tests.rq_workers import leftovers

if TYPE_CHECKING:
    from tests.faults.older_client import OlderClient

F = "tests.worker.functions."
QUEUES = ("high", "bulk")
ROWS, ROWS_PER_SHARD = 300, 12
REPEATS = 2
_ENDS = (Result.Type.SUCCESSFUL, Result.Type.FAILED)


@dataclass
class Findings:
    """Counts over audits.

    asked, delivered: jobs and rows. redone: executions whose worker died with them. lost: jobs or rows
    without an end, or with a wrong one. doubled: with one too many. orphaned: entries and files that nobody
    will remove. wrong: anything else, such as an error without a name of ours or a worker's exit code.
    """

    jobs: int = 0
    rows: int = 0
    delivered: int = 0
    redone: int = 0
    lost: int = 0
    doubled: int = 0
    orphaned: int = 0
    wrong: int = 0
    details: list[str] = field(default_factory=list)

    def add(self, other: Findings) -> None:
        """Sum up."""
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))

    @property
    def is_clean(self) -> bool:
        """Whether nothing was found."""
        return not (self.lost or self.doubled or self.orphaned or self.wrong)


@dataclass(frozen=True)
class Expected:
    """How a job must end: with this answer, this many times."""

    answer: str
    times: int = 1


@dataclass(eq=False)
class Run:
    """One Parquet run that was asked for, and the jobs that planned it."""

    source: Path
    output: Path
    rows: int
    rows_per_shard: int
    planning: list[str] = field(default_factory=list)

    @property
    def has_ended(self) -> bool:
        return (self.output / "_SUCCESS").exists()

    def parts(self) -> dict[str, int]:
        """The finished parts, with what tells one file from another."""
        return {part.name: part.stat().st_ino for part in self.output.rglob("part-*")}

    def answers(self) -> list[tuple[int, str]]:
        """What was delivered: `id` and completion of each row."""
        table = pq.read_table(self.output, columns=["id", "completion"]).to_pydict()
        return list(zip(table["id"], table["completion"], strict=True))


def write_rows(path: Path, rows: int = ROWS, word: str = "row") -> Path:
    """Write an input: `id` counts the rows, `prompt` is `<word> <id>`."""
    table = pa.table({"id": list(range(rows)), "prompt": [f"{word} {i}" for i in range(rows)]})
    pq.write_table(table, path, row_group_size=70)
    return path


class Ledger:
    """Asks for jobs of every kind and for Parquet runs, and knows how each must end."""

    def __init__(self, redis: Redis, folder: Path, rng: random.Random) -> None:
        self._redis, self._folder, self._rng = redis, folder, rng
        self._expected: dict[str, Expected] = {}
        self._runs: list[Run] = []
        self._unnamed: list[str] = []
        self._count = self._num_runs = 0
        self.older: OlderClient | None = None
        """Another producer, who enqueues and audits half of the jobs."""
        self._asked_there: set[str] = set()
        self._source = write_rows(folder / "in.parquet")

    def backlog(self) -> int:
        """Jobs that wait."""
        return sum(self._redis.llen(f"rq:queue:{name}") for name in QUEUES)

    def is_idle(self) -> bool:
        """Whether no job waits and none runs, at one moment: one that repeats goes from worker to queue."""
        with self._redis.pipeline() as pipe:
            for name in QUEUES:
                pipe.llen(f"rq:queue:{name}")
                pipe.zcard(f"rq:wip:{name}")
                pipe.hlen(held_key(name))
            return not any(pipe.execute())

    def state(self) -> tuple[int, ...]:
        """Counts of what waits, runs, has ended and is written: they stand still where nothing goes on."""
        registries = [
            f"rq:{kind}:{name}" for kind in ("wip", "finished", "failed") for name in QUEUES
        ]
        parts = sum(len(run.parts()) for run in self._runs)
        return self.backlog(), *(self._redis.zcard(key) for key in registries), parts

    def ask_jobs(self, count: int) -> list[str]:
        """Enqueue jobs: one of each kind after the other, on both queues. Return the ids of all expected."""
        if self.older is not None:
            self._asked_there.update(self.older.ask_jobs(count // 2))
            count -= count // 2
        with self._redis.pipeline() as pipe:
            for _ in range(count):
                self._count += 1
                number, name = self._count, self._rng.choice(QUEUES)
                self._ask(
                    number, Queue(name, connection=self._redis, serializer=JSONSerializer), pipe
                )
            pipe.execute()
        return list(self._expected)

    def _ask(self, number: int, queue: Queue, pipe: Pipeline) -> None:
        prompt, kind = f"prompt {number}", number % 11
        expected = Expected(f"echo:{prompt}")
        arguments: tuple[Any, ...] = ("jobs.complete", prompt)
        tokens: dict[str, Any] = {"max_tokens": 1 + number % 6}
        if kind in (1, 2):
            arguments, expected = ("jobs.complete", "refuse"), Expected("failed")
        if kind == 3:
            arguments, tokens, expected = (F + "ask_for_retry", 1), {}, Expected("done")
        if kind == 4:
            arguments, tokens, expected = (F + "add", number, 1), {}, Expected(str(number + 1))
        options: dict[str, Any] = {"result_ttl": -1, "failure_ttl": -1, "timeout": -1}
        if kind in (1, 5):
            options["retry"] = Retry(max=2)
        if kind in (2, 6):
            options |= {"on_failure": Callback(F + "ignore"), "on_success": Callback(F + "ignore")}
        job = queue.create_job(*arguments[:1], arguments[1:], tokens, **options)
        if kind == 9:
            job.repeats_left, job.repeat_intervals = REPEATS, [0]
            expected = Expected(expected.answer, REPEATS + 1)
        self._expected[job.id] = expected
        if kind in (
            2,
            7,
            8,
        ):  # before its parent: RQ forgets a child that comes after it has failed
            self._ask_child(job, queue, f"after {number}")
        queue.enqueue_job(job, pipeline=pipe)

    def _ask_child(self, parent: Job, queue: Queue, prompt: str) -> None:
        parent.save()
        after = Dependency([parent], allow_failure=True)
        child = queue.enqueue(
            "jobs.complete", prompt, max_tokens=2, depends_on=after, result_ttl=-1, job_timeout=-1
        )
        self._expected[child.id] = Expected(f"echo:{prompt}")

    def ask_run(
        self,
        rows_per_shard: int = ROWS_PER_SHARD,
        source: Path | None = None,
        output: Path | None = None,
        rows: int = ROWS,
        submitters: int = 1,
    ) -> Run:
        """Enqueue the planning of a Parquet run into a new folder, by several submitters at once."""
        self._num_runs += 1
        output = output or self._folder / f"out-{self._num_runs}"
        run = Run(source or self._source, output, rows, rows_per_shard)
        self._runs.append(run)
        for _ in range(submitters):
            self.submit(run)
        return run

    def submit(self, run: Run) -> Job:
        """Enqueue the planning of a run, or submit it again: that forgets how its jobs have failed."""
        self._unnamed += [f"{run.output.name}: {text}" for text in self._without_name(run)]
        queue = Queue("bulk", connection=self._redis, serializer=JSONSerializer)
        job = queue.enqueue(
            "jobs.score_parquet",
            str(run.source),
            str(run.output),
            sampling={"max_tokens": 2},
            rows_per_shard=run.rows_per_shard,
            on_end=F + "note_end",
            job_timeout=-1,
            result_ttl=-1,
            failure_ttl=-1,
        )
        run.planning.append(job.id)
        return job

    def failures(self, run: Run) -> list[str]:
        """What the failed jobs of a run raised, its planning included."""
        ids = [job_id.decode() for job_id in self._redis.zrange("rq:failed:bulk", 0, -1)]
        prefix = _run_id(run.output)
        ours = [i for i in ids if i in run.planning or (prefix and i.startswith(f"{prefix}-"))]
        jobs = Job.fetch_many(ours, self._redis, JSONSerializer)
        return [str(result.exc_string) for job in jobs if job and (result := job.latest_result())]

    def _without_name(self, run: Run) -> list[str]:
        return [text[-400:] for text in self.failures(run) if not NAMED.search(text)]

    def resume_failed_runs(self) -> int:
        """Submit again what a fault of the files has failed, as its owner would; return how many."""
        again = [run for run in self._runs if not run.has_ended and self.failures(run)]
        for run in again:
            self.submit(run)
        return len(again)

    def all_ended(self) -> bool:
        """Whether every job has an end and every run its mark; orphans are the audit's."""
        if not self.is_idle() or not all(run.has_ended for run in self._runs):
            return False
        asked = self._expected.keys() | self._asked_there
        if asked - self._listed().keys():  # a job's status is whatever was saved last
            return False
        return not leftovers(self._redis, *QUEUES)

    def audit(self) -> Findings:
        """Compare everything asked since the last audit with what was delivered; start a new page."""
        found = Findings() if self.older is None else self.older.audit()
        self._audit_jobs(found)
        for run in self._runs:
            self._audit_run(run, found)
        orphans = leftovers(self._redis, *QUEUES)
        found.orphaned += len(orphans)
        found.details += [f"orphan {orphan}" for orphan in orphans]
        found.wrong += len(self._unnamed)
        found.details += [f"failed without a named error: {text}" for text in self._unnamed]
        self._unnamed = []
        self._expected.clear()
        self._asked_there.clear()
        self._runs = []
        return found

    def _listed(self) -> Counter[str]:
        """How often each job is in a registry of jobs that have ended."""
        listed: Counter[str] = Counter()
        for name in QUEUES:
            for registry in ("finished", "failed"):
                listed.update(
                    i.decode() for i in self._redis.zrange(f"rq:{registry}:{name}", 0, -1)
                )
        return listed

    def _audit_jobs(self, found: Findings) -> None:
        listed = self._listed()
        with self._redis.pipeline(transaction=False) as pipe:
            for job_id in self._expected:
                pipe.hget(Job.key_for(job_id), "status")
                pipe.get(f"tokenmill:deaths:{job_id}")
                pipe.xrange(Result.get_key(job_id))
            replies = pipe.execute()
        for (job_id, expected), status, deaths, entries in zip(
            self._expected.items(), replies[::3], replies[1::3], replies[2::3], strict=True
        ):
            found.jobs += 1
            found.redone += int(deaths or 0)
            results = [
                Result.restore(job_id, i.decode(), fields_, self._redis, JSONSerializer)
                for i, fields_ in entries
            ]
            ends = [result for result in results if result.type in _ENDS]
            what = (
                f"{job_id} ({expected}): {len(ends)} ends, {status}, listed {listed[job_id]} times"
            )
            if len(ends) > expected.times or listed[job_id] > 1:
                found.doubled += 1
                found.details.append(f"doubled {what}")
            elif (
                len(ends) < expected.times
                or not listed[job_id]
                or _answer(ends[-1]) != expected.answer
            ):
                found.lost += 1
                why = [(result.exc_string or "").strip()[-200:] for result in ends]
                found.details.append(f"lost {what}, {why}")
            else:
                found.delivered += 1

    def _audit_run(self, run: Run, found: Findings) -> None:
        name = run.output.name
        found.rows += run.rows
        found.orphaned += len(list(run.output.rglob("_tmp.*")))
        self._unnamed += [f"{name}: {text}" for text in self._without_name(run)]
        if not run.has_ended:
            found.lost += run.rows
            found.details.append(f"run {name} has not ended; failed: {self.failures(run)[:3]}")
            return
        answered = run.answers()
        times = Counter(row for row, _ in answered)
        lost = sum(times[i] == 0 for i in range(run.rows))
        doubled = sum(count - 1 for count in times.values())
        wrong = sum(text != f"echo:row {i}" for i, text in answered)
        found.delivered += run.rows - lost - wrong
        found.lost += lost + wrong
        found.doubled += doubled
        if lost or doubled or wrong:
            found.details.append(f"run {name}: {lost} rows lost, {doubled} doubled, {wrong} wrong")
        if json.loads((run.output / "_manifest.json").read_text())["rows"] != run.rows:
            found.details.append(f"the manifest of {name} counts other rows")
            found.lost += 1
        self._audit_told(run, found)

    def _audit_told(self, run: Run, found: Findings) -> None:
        """What was told of a run's end must be true, and must have been told."""
        told = [
            json.loads(text) for text in self._redis.lrange(f"tokenmill:told:{run.output}", 0, -1)
        ]
        finished = [each for each in told if each["state"] == "finished"]
        true = {"rows": run.rows, "rows_done": run.rows, "errors": 0, "reason": None}
        untrue = [
            each for each in finished if any(each[name] != value for name, value in true.items())
        ]
        if untrue or not finished:
            found.details.append(
                f"run {run.output.name} was told of as {untrue or told}, expected {true}"
            )
            found.wrong += 1


def _run_id(output: Path) -> str | None:
    try:
        return str(json.loads((output / "_plan.json").read_text())["run"])
    except OSError:
        return None


def _answer(result: Result) -> str:
    value = result.return_value
    if isinstance(value, dict):
        return str(value["choices"][0]["text"])
    return "failed" if result.exc_string else str(value)
