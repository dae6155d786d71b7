"""What being watched costs a worker: with metrics, a scrape a second and the page open, against without.

    OMP_NUM_THREADS=1 python -m ops.bench.watched --rounds 5

In each round a worker works off the same queue twice, watched and alone, the next round in the other order.
`jobs` have an engine that computes nothing: what is left is what a job costs the worker. `tokens` have the
demo's model. Compared is processor time, of the process with all its threads, from the loaded model to the
worker's end: on a busy machine wall time says little. Watched means TOKENMILL_METRICS_PORT, whose /metrics is
read each second, and `tokenmill dashboard` with what a browser on it asks every two seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from redis import Redis
from rq import Queue
from rq.serializers import JSONSerializer

from ops.bench.queue import NoModelWorker
from ops.bench.report import print_machine
from ops.bench.table import print_table, spread
from tests.redis_server import running_redis_server
from worker import BatchWorker
from worker.settings import WorkerSettings

MODEL = Path(__file__).parents[1] / "demo" / "model"
QUEUE = "watched"
BAR = 0.98
SCRAPE_S, PAGE_S = 1.0, 2.0


class _Timed(BatchWorker):
    """Notes the processor time at which its model is loaded."""

    def load_engine(self, settings: WorkerSettings) -> Any:
        engine = super().load_engine(settings)
        self.loaded_s = time.process_time()
        return engine


class TokensWorker(_Timed):
    """The engine's."""


class JobsWorker(_Timed, NoModelWorker):
    """An instant engine's."""


KINDS: dict[str, type[Any]] = {"jobs": JobsWorker, "tokens": TokensWorker}


def serve(kind: str, url: str) -> None:
    """Work off the queue in this process; print the processor seconds behind the loading."""
    worker = KINDS[kind]([QUEUE], connection=Redis.from_url(url), serializer=JSONSerializer)
    worker.work(burst=True, logging_level="WARNING")
    print(json.dumps(time.process_time() - worker.loaded_s))


def measure(kind: str, url: str, jobs: int, is_watched: bool) -> tuple[float, list[int]]:
    """Processor seconds of one worker for the whole queue; scrapes and views of the page meanwhile."""
    with Redis.from_url(url) as redis:
        redis.flushall()
        queue = Queue(QUEUE, connection=redis, serializer=JSONSerializer)
        sampling = {"max_tokens": 1 if kind == "jobs" else 64, "temperature": 0, "ignore_eos": kind != "jobs"}
        for start in range(0, jobs, 1000):
            numbers = range(start, min(start + 1000, jobs))
            calls = [(f"Monday, {1 + i % 28} May {1900 + i}",) for i in numbers]
            queue.enqueue_many(
                [Queue.prepare_data("jobs.complete", call, sampling, timeout=-1) for call in calls]
            )
        port = free_port()
        environment = {
            **os.environ,
            "TOKENMILL_MODEL": str(MODEL) if kind == "tokens" else "none",
            "TOKENMILL_MAX_NUM_SEQS": "128",
            "TOKENMILL_METRICS_PORT": str(port if is_watched else 0),
        }
        command = [sys.executable, "-m", "ops.bench.watched", "--serve", kind, "--url", url]
        with watchers(url, port) if is_watched else nobody() as scrapes:
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        assert redis.zcard(f"rq:finished:{QUEUE}") == jobs, "not all jobs were finished"
    return float(json.loads(done.stdout.splitlines()[-1])), scrapes


@contextmanager
def nobody() -> Iterator[list[int]]:
    """Watches nothing."""
    yield [0, 0]


@contextmanager
def watchers(url: str, port: int) -> Iterator[list[int]]:
    """Scrape the worker's port, and serve the page with a reader, until the end; counts what was answered."""
    page_port, is_over, scrapes = free_port(), threading.Event(), [0, 0]
    start = "from jobs.cli import main; main()"
    command = [sys.executable, "-c", start, "--url", url, "dashboard", "--port", str(page_port)]
    page = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def scrape() -> None:
        while not is_over.wait(SCRAPE_S):
            scrapes[0] += _read(f"http://127.0.0.1:{port}/metrics")

    def look() -> None:
        while not is_over.wait(PAGE_S):
            scrapes[1] += _read(f"http://127.0.0.1:{page_port}/")
            _read(f"http://127.0.0.1:{page_port}/series.json")

    threads = [threading.Thread(target=each) for each in (scrape, look)]
    for thread in threads:
        thread.start()
    try:
        yield scrapes
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
        page.terminate()
        page.wait()


def _read(url: str) -> int:
    """1 where it was answered."""
    try:
        with urllib.request.urlopen(url, timeout=5) as reply:
            reply.read()
    except OSError:
        return 0
    return 1


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def main() -> None:
    """Run the rounds; print the ratio of work for the same processor time, watched ÷ alone."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=20_000, help="with the engine that computes nothing")
    parser.add_argument("--prompts", type=int, default=1500, help="of 64 tokens each, with the model")
    parser.add_argument("--serve", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.url)
        return
    print_machine()
    rows = []
    with running_redis_server() as url:
        for kind, jobs in (("jobs", options.jobs), ("tokens", options.prompts)):
            found: dict[bool, list[float]] = {True: [], False: []}
            seen = [0, 0]
            for number in range(options.rounds):
                for is_watched in (True, False) if number % 2 else (False, True):
                    seconds, scrapes = measure(kind, url, jobs, is_watched)
                    found[is_watched].append(seconds)
                    seen = [a + b for a, b in zip(seen, scrapes, strict=True)]
            ratios = [alone / watched for alone, watched in zip(found[False], found[True], strict=True)]
            verdict = "met" if statistics.median(ratios) >= BAR else "missed"
            times = [spread(found[is_watched]) for is_watched in (False, True)]
            rows.append([kind, *times, *seen, spread(ratios, 3), verdict])
    print_table(
        ["", "CPU s alone", "CPU s watched", "scrapes", "views", "watched ÷ alone", f"bar {BAR}"], rows
    )


if __name__ == "__main__":
    main()
