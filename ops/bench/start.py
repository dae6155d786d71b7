"""Seconds from `rq worker` to the first completion, and to the worker's readiness.

    python -m ops.bench.start --rounds 3

A job waits in the queue; a real Redis and a real `rq worker` are started; the clock runs from the start of
the worker's process until the job's result is in Redis. What a cold disk adds is not in it.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from redis import Redis
from rq import Queue
from rq.serializers import JSONSerializer

from ops.bench.make import OUT, SHAPES, make_checkpoint
from ops.bench.report import gemm_ms, print_machine
from ops.bench.table import print_table, spread
from ops.redis_server import server_command, wait_until_ready

QUEUE, WORKER = "prompts", "bench"
RQ_WORKER = ["worker", "--worker-class", "worker.BatchWorker", "-S", "json", "--name", WORKER, QUEUE]
LIMIT_S = 300
BAR_S = 8.0


def worker_environment(url: str, model: Path) -> dict[str, str]:
    """What the worker sees: no setting of the user's own but how threads wait."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("TOKENMILL_", "RQ_"))}
    return {**kept, "RQ_REDIS_URL": url, "TOKENMILL_MODEL": str(model)}


def measure_start(url: str, model: Path, log: Path) -> dict[str, float]:
    """Seconds from the start of a worker until it is ready, and until a job that waited has its result."""
    with Redis.from_url(url, socket_timeout=None) as redis:
        redis.flushall()
        queue = Queue(QUEUE, connection=redis, serializer=JSONSerializer)
        job = queue.enqueue("jobs.complete", "the first of many", max_tokens=8, temperature=0)
        seen: dict[str, float] = {}
        with log.open("wb") as output:
            started = time.perf_counter()
            worker = subprocess.Popen(
                [sys.executable, "-m", "rq.cli", *RQ_WORKER],
                env=worker_environment(url, model),
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        try:
            while (waited := time.perf_counter() - started) < LIMIT_S and worker.poll() is None:
                if "ready" not in seen and redis.exists(f"tokenmill:worker:{WORKER}"):
                    seen["ready"] = waited
                # waits up to a second for the result, and returns at once when it comes
                result = job.latest_result(timeout=1 if "ready" in seen else 0)
                if result is not None:
                    if result.return_value is None:
                        sys.exit(f"the first job failed:\n{result.exc_string}")
                    return {**seen, "first completion": time.perf_counter() - started}
                time.sleep(0 if "ready" in seen else 0.01)  # readiness is a key, which nothing announces
        finally:
            worker.send_signal(signal.SIGTERM)
            try:
                worker.wait(timeout=60)
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()
    sys.exit(f"no completion after {LIMIT_S} s, or the worker ended:\n{log.read_text()}")


def main() -> None:
    """Start a worker several times; print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="q54m", help="one of ops.bench.make's shapes, or a folder")
    parser.add_argument("--folder", type=Path, default=OUT)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    model = Path(options.model)
    if options.model in SHAPES:
        model = options.folder / options.model
        if not (model / "config.json").exists():
            make_checkpoint(model, SHAPES[options.model])
    print_machine()
    found = []
    with tempfile.TemporaryDirectory(prefix="start-") as name:  # a socket's path must stay short
        folder, socket = Path(name), Path(name) / "s"
        url = f"unix://{socket}"
        with (folder / "redis.log").open("wb") as output:
            server = subprocess.Popen(server_command(folder, socket), stdout=output, stderr=output)
        try:
            wait_until_ready(url)
            for _ in range(options.rounds):
                gemm = gemm_ms(torch.get_num_threads())
                found.append({**measure_start(url, model, folder / "worker.log"), "gemm ms": gemm})
                print(", ".join(f"{key} {value:.2f}" for key, value in found[-1].items()), flush=True)
        finally:
            server.terminate()
            server.wait()
    print_table(
        [f"`rq worker` on {options.model}", "median (least..most)"],
        [[f"{key}, s" if "ms" not in key else key, spread([run[key] for run in found])] for key in found[0]],
    )
    slowest = max(run["first completion"] for run in found)
    print(f"first completion after at most {slowest:.2f} s (bar {BAR_S:g})")


if __name__ == "__main__":
    main()
