"""The length of an engine step beside jobs that come and end: what the I/O thread takes from the engine.

    python -m ops.bench.step_time --rates 0 100 300 1000 --seconds 5 --rounds 3

One worker, real but for the model: claim, packing, scheduler, batch building and finish run as ever,
against a real Redis. A step of the model is a wait of 3.5 ms without the interpreter's lock, as that for a
GPU is, and the next step is scheduled meanwhile. A full batch decodes all the time, and the length of the
completions sets how many jobs end per second; where a machine takes longer for a step, fewer do. A step is
timed from its call to the next one. The rounds alternate between the rates.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from redis import Redis
from rq import Queue
from rq.serializers import JSONSerializer

from engine import Completion, Engine, EngineConfig
from engine.run.pending_tokens import PendingTokens
from engine.run.runner import PoolSize
from engine.sampling.sampling_batch import SamplingBatch
from engine.schedule.step_batch import StepBatch
from ops.bench.report import print_machine
from ops.bench.table import print_table
from tests.redis_server import running_redis_server
from worker import BatchWorker
from worker.assembly import assemble
from worker.io_thread.io_events import Shutdown
from worker.settings import WorkerSettings

MODEL = Path(__file__).resolve().parents[1] / "demo" / "model"  # for its tokenizer; no weight is read
SLOTS = 256
DEVICE_S = 0.0035
PROMPT_TOKENS = 100
ENDLESS = 30_000
SETTLE_S = 2.0
"""The first prefills, before steps are counted."""


class Device(PendingTokens):
    """A step on a device that takes one after the other, `DEVICE_S` each."""

    def __init__(self, ready_at: float, num_samples: int) -> None:
        self._ready_at, self._num_samples = ready_at, num_samples

    def wait(self) -> NDArray[np.int64]:
        time.sleep(max(0.0, self._ready_at - time.perf_counter()))
        return np.full(self._num_samples, 7, np.int64)


class DeviceRunner:
    """Stands in for a ModelRunner on a GPU."""

    backend_name, has_graphs = "none", False
    pool_size = PoolSize(SLOTS * 1024, 0, PROMPT_TOKENS + ENDLESS + 1)

    def __init__(self, *_: Any) -> None:
        self._busy_until = 0.0

    def launch(self, step: StepBatch, sampling: SamplingBatch) -> PendingTokens:
        self._busy_until = max(self._busy_until, time.perf_counter()) + DEVICE_S
        return Device(self._busy_until, len(step.sample_rows))

    def close(self) -> None:
        pass


class TimedEngine(Engine):
    """Notes when each step was called, the CPU time of its thread until then, and what has finished."""

    def __init__(self) -> None:
        config = EngineConfig(str(MODEL), device="cpu", max_num_seqs=SLOTS, async_scheduling=True)
        super().__init__(config, start_runner=DeviceRunner)
        self.calls: list[tuple[float, float, int]] = []
        self._num_finished = 0

    def step(self) -> list[Completion]:
        self.calls.append((time.perf_counter(), time.thread_time(), self._num_finished))
        finished = super().step()
        self._num_finished += len(finished)
        return finished


class Run:
    """Steps of one run at full batch, in milliseconds, and the CPU time of its two threads."""

    def __init__(self, calls: list[tuple[float, float, int]], io_cpu_s: float) -> None:
        (first, first_cpu, first_jobs), (last, last_cpu, last_jobs) = calls[0], calls[-1]
        self.steps_ms = [1000 * (after[0] - before[0]) for before, after in pairwise(calls)]
        self.mean_ms = statistics.mean(self.steps_ms)
        self.jobs_per_s = (last_jobs - first_jobs) / (last - first)
        self.main_cpu_ms = 1000 * (last_cpu - first_cpu) / len(self.steps_ms)
        self.io_cpu_ms = 1000 * io_cpu_s / len(self.steps_ms)


def measure(url: str, rate: float, seconds: float) -> Run:
    """Run a worker for `seconds` at full batch."""
    with Redis.from_url(url) as redis:
        redis.flushall()
        _enqueue(redis, lengths_for(rate, int(rate * (seconds + SETTLE_S)) + 2 * SLOTS))
        worker = BatchWorker(["bench"], connection=redis, serializer=JSONSerializer, prepare_for_work=True)
        worker.register_birth()  # type: ignore[no-untyped-call]
        settings = WorkerSettings(model="none", max_num_seqs=SLOTS)
        with TimedEngine() as engine:
            loop, io = assemble(worker, engine, settings, False, None, None)
            readings: list[tuple[int, float]] = []

            def read() -> None:  # runs in the I/O thread, whose CPU time it takes
                readings.append((len(engine.calls), time.thread_time()))
                if len(readings) == 2:
                    io.post(Shutdown.COLD)

            for delay_s in (SETTLE_S, SETTLE_S + seconds):
                threading.Timer(delay_s, io.post, [read]).start()
            io.start()
            loop.run()
            io.join()
            if io.error is not None:
                raise io.error
    (begin, begin_cpu_s), (end, end_cpu_s) = readings
    return Run(engine.calls[begin:end], end_cpu_s - begin_cpu_s)


def lengths_for(rate: float, jobs: int) -> list[int]:
    """Completion lengths with which a full batch ends `rate` jobs per second, evenly spread."""
    if rate == 0:
        return [ENDLESS] * jobs
    mean = SLOTS / (rate * DEVICE_S)
    return [int(n) for n in np.random.default_rng(0).uniform(1, 2 * mean, jobs)]


def _enqueue(redis: Redis, lengths: list[int]) -> None:
    queue = Queue("bench", connection=redis, serializer=JSONSerializer)
    for start in range(0, len(lengths), 1000):
        prompt = [10 + start // 1000] * PROMPT_TOKENS
        queue.enqueue_many(
            [
                Queue.prepare_data(
                    "jobs.complete", (prompt,), {"max_tokens": n, "ignore_eos": True}, timeout=-1
                )
                for n in lengths[start : start + 1000]
            ]
        )


def main() -> None:
    """Run the rounds; print the step at each rate, how much longer it is, and the threads' CPU time."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--rates", type=int, nargs="+", default=[0, 100, 300, 1000])
    parser.add_argument("--seconds", type=float, default=5.0, help="of each run")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with running_redis_server() as url:
        rounds = [
            {rate: measure(url, rate, options.seconds) for rate in options.rates}
            for _ in range(options.rounds)
        ]
    print_machine()
    rows = []
    for rate in options.rates:
        runs = [each[rate] for each in rounds]
        steps = sorted(step for run in runs for step in run.steps_ms)
        longer = [each[rate].mean_ms / each[options.rates[0]].mean_ms - 1 for each in rounds]
        rows.append(
            [
                f"{statistics.mean(run.jobs_per_s for run in runs):.0f}",
                f"{statistics.mean(steps):.2f}",
                f"{steps[len(steps) // 2]:.2f}",
                f"{steps[len(steps) * 99 // 100]:.2f}",
                f"{statistics.median(longer):.1%}",
                ", ".join(f"{each:.1%}" for each in longer),
                f"{statistics.mean(run.main_cpu_ms for run in runs):.2f}",
                f"{statistics.mean(run.io_cpu_ms for run in runs):.2f}",
            ]
        )
    print_table(
        ["jobs/s", "step ms", "median", "p99", "longer", "by round", "CPU ms/step: engine", "I/O thread"],
        rows,
    )


if __name__ == "__main__":
    main()
