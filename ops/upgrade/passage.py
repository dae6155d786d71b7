"""One passage from a version to another while work goes on, and the audit of what came of it."""

from __future__ import annotations

import json
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from rq import Queue
from rq.job import Job
from rq.results import Result
from rq.serializers import JSONSerializer

from jobs.runs.names import shard_job_id
from ops.upgrade.fleet import QUEUES, Fleet, Version, Worker
from tests.rq_workers import leftovers

WAIT_S = 900
ROWS_PER_SHARD = 12
MAX_TOKENS = 32


class Passage:
    """Replaces workers of one version by those of another at shares of the runs' work, and back, and again.

    before, after: both have a worker at all times but the first and the last. newest: whose command is asked.
    """

    def __init__(self, fleet: Fleet, before: Version, after: Version, newest: Version, rows: int) -> None:
        self._fleet, self._before, self._after, self._rows = fleet, before, after, rows
        self._newest = newest
        self._outputs = {version: fleet.folder / f"out-{version.name}" for version in (before, after)}
        self._runs: dict[Version, str] = {}
        self._jobs: list[Job] = []
        self._done: Counter[tuple[str, str]] = Counter()
        self._started = time.monotonic()

    def told(self) -> str:
        """What was done, in one line."""
        work = ", ".join(f"{number} {kind} by {name}" for (name, kind), number in sorted(self._done.items()))
        way, seconds = f"{self._before.name} -> {self._after.name}", time.monotonic() - self._started
        return f"{way}: {work}; {len(self._fleet.workers)} workers, {seconds:.0f} s"

    def go(self) -> list[str]:
        """Do it; return what is amiss."""
        old, new = self._before, self._after
        first, second, third, fourth, fifth, sixth = self._start([old, old, new, new, old, new])
        self._submit()
        self._until(0.1, first, second)
        self._thaw(third)
        self._stop(first)
        self._until(0.3, third)
        self._thaw(fourth)
        self._kill(second)
        self._until(0.45, fourth)
        self._thaw(fifth)  # one goes back
        self._stop(third)
        self._until(0.6, fifth)
        self._thaw(sixth)
        self._kill(fourth)
        self._until(0.75, sixth)
        self._stop(fifth)
        self._until(1.0)
        self._await(lambda: all((output / "_SUCCESS").exists() for output in self._outputs.values()))
        self._await(lambda: all(job.latest_result() for job in self._jobs))
        status = self._problems_of_status()
        self._stop(sixth)
        return [
            *status,
            *self._problems_of_jobs(),
            *(problem for version in self._outputs for problem in self._problems_of_run(version)),
            *self._problems_of_workers(),
        ]

    def _start(self, versions: Sequence[Version]) -> list[Worker]:
        """Start all that will be needed, and freeze all but two: to start takes longer than all the work."""
        workers = [self._fleet.start(version) for version in versions]
        self._await(lambda: all(self._fleet.sample(worker) for worker in workers))
        for worker in workers[2:]:
            worker.process.send_signal(signal.SIGSTOP)
        return workers

    def _thaw(self, worker: Worker) -> None:
        worker.process.send_signal(signal.SIGCONT)

    def _submit(self) -> None:
        for version, output in self._outputs.items():
            source = self._fleet.folder / f"in-{version.name}.parquet"
            prompts = [f"{version.name} {i}: " for i in range(self._rows)]
            pq.write_table(pa.table({"id": range(self._rows), "prompt": prompts}), source)
            sampling = json.dumps({"max_tokens": MAX_TOKENS, "ignore_eos": True})
            options = ["--rows-per-shard", str(ROWS_PER_SHARD), "--sampling", sampling]
            told = self._fleet.command(version, "submit", *options, str(source), str(output))
            self._runs[version] = told.split()[0]

    def _share(self) -> float:
        """Of both runs' shards, how much is in place."""
        parts = sum(len(list(output.glob("part-*.parquet"))) for output in self._outputs.values())
        return parts / (2 * -(-self._rows // ROWS_PER_SHARD))

    def _until(self, share: float, *workers: Worker) -> None:
        """Return once so much is done and these workers hold work; prompts come in meanwhile."""
        queue = Queue(QUEUES[0], connection=self._fleet.redis, serializer=JSONSerializer)

        def is_reached() -> bool:
            text = f"prompt {len(self._jobs)}: "
            self._jobs.append(
                queue.enqueue("jobs.complete", text, max_tokens=8, ignore_eos=True, result_ttl=-1)
            )
            told = [self._fleet.sample(worker) for worker in workers]
            return self._share() >= share and all(each and each.jobs_finished for each in told)

        self._await(is_reached, pause_s=0.5)

    def _await(self, condition: Callable[[], object], pause_s: float = 0.1) -> None:
        until = time.monotonic() + WAIT_S
        while not condition():
            for worker in self._fleet.workers:
                if worker.must_exit is None and worker.process.poll() is not None:
                    raise RuntimeError(f"{worker.name} has left by itself: {worker.log.read_text()[-2000:]}")
            if time.monotonic() > until:
                raise TimeoutError(
                    f"nothing came of it in {WAIT_S} s; {self._share():.0%} of the shards are done"
                )
            time.sleep(pause_s)

    def _stop(self, worker: Worker) -> None:
        worker.must_exit = 0
        worker.process.send_signal(signal.SIGTERM)
        worker.process.wait(timeout=60)

    def _kill(self, worker: Worker) -> None:
        """Kill a worker while it holds a job. Raises RuntimeError where no work is left for it."""

        def is_at_work() -> bool:
            if self._share() == 1.0:
                raise RuntimeError(
                    f"the runs were done before {worker.name} could be killed: give more --rows"
                )
            sample = self._fleet.sample(worker)
            return sample is not None and sample.jobs_held > 0

        self._await(is_at_work)
        worker.must_exit = -signal.SIGKILL
        worker.process.kill()
        worker.process.wait()

    def _version_of(self, worker_name: str) -> str:
        return worker_name.partition("-")[0]

    def _problems_of_jobs(self) -> list[str]:
        problems = []
        for job in self._jobs:
            results = [each for each in job.results() if each is not None]
            self._done[self._version_of(results[0].worker_name), "prompts"] += 1
            if [each.type for each in results] != [Result.Type.SUCCESSFUL]:
                problems.append(
                    f"job {job.id}: {[each.type.name for each in results]} {results[0].exc_string}"
                )
            else:
                value: Any = results[0].return_value
                if value["choices"][0]["finish_reason"] != "length":
                    problems.append(f"job {job.id}: {value}")
        return problems

    def _problems_of_run(self, version: Version) -> list[str]:
        run, output = self._runs[version], self._outputs[version]
        problems = problems_of_rows(output, self._rows)
        for shard in range(-(-self._rows // ROWS_PER_SHARD)):
            job = Job.fetch(shard_job_id(run, shard), self._fleet.redis, serializer=JSONSerializer)
            results = [each for each in job.results() if each and each.type == Result.Type.SUCCESSFUL]
            if len(results) != 1:
                problems.append(f"{job.id}: {len(results)} ends")
            else:
                self._done[self._version_of(results[0].worker_name), "shards"] += 1
        return [f"{run}: {problem}" for problem in problems]

    def _problems_of_status(self) -> list[str]:
        """The newer command must tell of both runs; an older one may overlook what newer workers wrote."""
        problems = []
        for run in self._runs.values():
            told = self._fleet.command(self._newest, "status", run)
            if not re.search(rf"^rows +{self._rows}\b", told, re.MULTILINE):
                problems.append(f"{self._newest.name}'s status of {run}: {told}")
        return problems

    def _problems_of_workers(self) -> list[str]:
        problems = []
        for worker in self._fleet.workers:
            if worker.process.returncode != worker.must_exit:
                problems.append(
                    f"{worker.name} left with {worker.process.returncode}, not {worker.must_exit}"
                )
            log = worker.log.read_text()
            if "Traceback" in log or " ERROR" in log:
                problems.append(f"{worker.name} tells of an error, see {worker.log}")
        for kind in ("prompts", "shards"):
            for version in self._outputs:
                if not self._done[version.name, kind]:
                    problems.append(f"no {kind} were done by {version.name}")
        return problems + [f"left in Redis: {each}" for each in leftovers(self._fleet.redis, *QUEUES)]


def problems_of_rows(output: Path, num_rows: int) -> list[str]:
    """Look for each row of a finished run in its parts: once, in order and with an answer."""
    parts = sorted(output.glob("part-*.parquet"))
    columns = ["id", "error", "completion_tokens"]
    rows = pa.concat_tables([pq.read_table(part, columns=columns) for part in parts])
    problems = []
    if (ids := rows["id"].to_pylist()) != list(range(num_rows)):
        problems.append(f"{len(ids)} rows, {len(set(ids))} different ones of {num_rows}")
    if rows["error"].null_count != len(ids) or 0 in rows["completion_tokens"].to_pylist():
        problems.append(f"rows without an answer: {set(rows['error'].to_pylist())}")
    manifest: dict[str, Any] = json.loads((output / "_manifest.json").read_text())
    if (manifest["rows"], manifest["errors"]) != (num_rows, 0):
        problems.append(f"the manifest has {manifest['rows']} rows, {manifest['errors']} errors")
    if left := [path.name for path in output.iterdir() if path.name.startswith("_tmp")]:
        problems.append(f"left behind: {left}")
    return problems
