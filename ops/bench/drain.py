"""Whether the worker keeps the engine's batch full: the same rows as one job, as twenty, as a job each, and
straight through `engine.generate`.

    python -m ops.bench.make --models q54m
    python -m ops.bench.drain --model ops/out/bench/q54m --threads 2 --rounds 5

One `rq worker` and one engine of the same configuration, each in a process of its own, take turns with rows
of equal length and fresh token ids. The clock runs from the call of a run's first step to the return of its
last one, as each engine notes them: what comes before is the start of a process and the first claim, what
comes after is Redis telling the caller. Steps and rows per step are counted beside it.
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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from redis import Redis
from rq import Queue
from rq.job import Job
from rq.serializers import JSONSerializer

from engine import Completion, Engine, EngineConfig, SamplingParams
from ops.bench.report import print_machine
from ops.bench.table import spread
from tests.redis_server import running_redis_server
from worker import BatchWorker
from worker.settings import WorkerSettings

QUEUE = "drain"
JOBS = 20
BAR = 0.97
STEPS_FILE = "DRAIN_STEPS_FILE"
RUN_TIMEOUT_S = 300


@dataclass(frozen=True)
class Step:
    """When one step began and ended, in seconds of the monotonic clock, and the rows it finished."""

    began: float
    ended: float
    finished: int


class NotingEngine(Engine):
    """Notes its steps in a file that another process may read."""

    def __init__(self, config: EngineConfig, file: Path) -> None:
        super().__init__(config)
        self._file = file.open("w", buffering=1)

    def step(self) -> list[Completion]:
        began = time.monotonic()
        done = super().step()
        self._file.write(json.dumps([began, time.monotonic(), len(done)]) + "\n")
        return done

    def close(self) -> None:
        super().close()
        self._file.close()


class NotingWorker(BatchWorker):
    """BatchWorker with such an engine."""

    def load_engine(self, settings: WorkerSettings) -> Engine:
        if settings.torch_threads is not None:
            torch.set_num_threads(settings.torch_threads)
        return NotingEngine(settings.engine_config(), Path(os.environ[STEPS_FILE]))


@dataclass(frozen=True)
class Run:
    """Output tokens per second, engine steps, and rows in a step on the average."""

    tokens_per_s: float
    steps: int
    rows_per_step: float


class Runs:
    """Rows of one kind, run in the four ways."""

    def __init__(self, engine: Engine, queue: Queue, files: dict[str, Path], rows: int, tokens: int) -> None:
        self._engine, self._queue, self._files = engine, queue, files
        self._rows, self._tokens = rows, tokens
        self._rng = random.Random(tokens)

    def generate(self) -> Run:
        """Straight through the engine."""
        params = SamplingParams(max_tokens=self._tokens, temperature=0.0, ignore_eos=True)
        return self._timed("engine", lambda: self._engine.generate(self._prompts(), params))

    def jobs(self, number: int) -> Run:
        """As so many queued jobs, each a list of prompts."""
        prompts, size = self._prompts(), -(-self._rows // number)
        parts = [prompts[start : start + size] for start in range(0, self._rows, size)]
        return self._timed("worker", lambda: self._work_off([(part,) for part in parts]))

    def single_prompts(self) -> Run:
        """As a job for each row."""
        return self._timed("worker", lambda: self._work_off([(prompt,) for prompt in self._prompts()]))

    def _prompts(self) -> list[list[int]]:
        lengths = [32 + row * 37 % 97 for row in range(self._rows)]
        return [[self._rng.randrange(10, 500) for _ in range(length)] for length in lengths]

    def _work_off(self, calls: list[tuple[list[list[int]] | list[int]]]) -> None:
        sampling = {"max_tokens": self._tokens, "temperature": 0, "ignore_eos": True}
        data = [Queue.prepare_data("jobs.complete", call, sampling, timeout=-1) for call in calls]
        jobs: list[Job] = self._queue.enqueue_many(data)
        for job in jobs:
            result = job.latest_result(timeout=RUN_TIMEOUT_S)
            assert result is not None, f"no result after {RUN_TIMEOUT_S} s"
            assert result.type == result.Type.SUCCESSFUL, result.exc_string

    def _timed(self, who: str, run: Callable[[], object]) -> Run:
        began = time.monotonic()
        run()
        steps = [Step(*json.loads(line)) for line in self._files[who].read_text().splitlines()]
        ours = [step for step in steps if step.began >= began]
        finished = sum(step.finished for step in ours)
        assert finished == self._rows, f"{finished} rows finished, not {self._rows}"
        seconds = ours[-1].ended - ours[0].began
        num_tokens = self._rows * self._tokens
        return Run(num_tokens / seconds, len(ours), num_tokens / len(ours))


def measure(options: argparse.Namespace) -> dict[int, list[dict[str, Run]]]:
    """For each number of output tokens the rounds, each with a run in every way."""
    found: dict[int, list[dict[str, Run]]] = {tokens: [] for tokens in options.tokens}
    with running_redis_server() as url, tempfile.TemporaryDirectory() as folder:
        files = {name: Path(folder) / name for name in ("engine", "worker")}
        environment = {
            **os.environ,
            "RQ_REDIS_URL": url,
            "TOKENMILL_MODEL": str(Path(options.model).resolve()),
            "TOKENMILL_TORCH_THREADS": str(options.threads),
            "TOKENMILL_MAX_NUM_SEQS": str(options.slots),
            "TOKENMILL_DEVICE": options.device,
            "TOKENMILL_DTYPE": options.dtype,
            STEPS_FILE: str(files["worker"]),
        }
        command = ["-m", "rq.cli", "worker", "-S", "json", "--worker-class", "ops.bench.drain.NotingWorker"]
        worker = subprocess.Popen([sys.executable, *command, "--quiet", QUEUE], env=environment)
        config = EngineConfig(
            options.model, dtype=options.dtype, device=options.device, max_num_seqs=options.slots
        )
        try:
            with (
                Redis.from_url(url, socket_timeout=RUN_TIMEOUT_S + 10) as redis,
                NotingEngine(config, files["engine"]) as engine,
            ):
                queue = Queue(QUEUE, connection=redis, serializer=JSONSerializer)
                for tokens in options.tokens:
                    runs = Runs(engine, queue, files, options.rows, tokens)
                    Runs(engine, queue, files, 4, tokens).jobs(4)  # the worker is ready after this
                    for _ in range(options.rounds):
                        found[tokens].append(
                            {
                                "engine.generate": runs.generate(),
                                "1 job": runs.jobs(1),
                                f"{JOBS} jobs": runs.jobs(JOBS),
                                "a job each": runs.single_prompts(),
                            }
                        )
        finally:
            worker.terminate()
            worker.wait(timeout=60)
    return found


def main() -> None:
    """Run the rounds; print each way's figures and the ratios within rounds."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--model", required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--slots", type=int, default=32, help="sequences that run at once")
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--tokens", type=int, nargs="+", default=[32, 8], help="output tokens of each row")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    found = measure(options)
    print_machine()
    for tokens, rounds in found.items():
        print(f"\n{options.rows} rows of {tokens} output tokens, {options.slots} slots")
        for way in rounds[0]:
            runs = [each[way] for each in rounds]
            print(
                f"  {way:<16} tok/s {spread([run.tokens_per_s for run in runs], 1):<28}"
                f" steps {runs[-1].steps:>5}   rows/step {runs[-1].rows_per_step:6.2f}"
            )
        for way, base in ((f"{JOBS} jobs", "1 job"), ("a job each", "engine.generate")):
            ratios = [each[way].tokens_per_s / each[base].tokens_per_s for each in rounds]
            steps = [each[base].steps / each[way].steps for each in rounds]
            print(f"  {way} / {base}: {spread(ratios)} (bar {BAR}); counted in steps {spread(steps, 3)}")


if __name__ == "__main__":
    main()
