"""What being watched costs: a worker's metrics scraped once a second and the page open, against nobody.

    OMP_NUM_THREADS=1 python -m ops.bench.watched --kind jobs
    OMP_NUM_THREADS=1 python -m ops.bench.watched --kind tokens

One worker, one Redis and one dashboard live through all of it. The worker gets the same piece of work again
and again, in turns of three: unwatched, with one beat a second, and with `--often` beats a second, shuffled.
A beat is a scrape of /metrics, and every second one also what a browser on the page asks. Unwatched, scraper
and dashboard are stopped by SIGSTOP. Compared within a turn is processor time, of each process with all its
threads: wall time says little on a machine with other work. What many beats cost, divided by their number,
tells a beat's cost with less noise than one of them does. The ratio is work for the same processor time when
a worker that keeps one core busy is watched at one beat a second. Intervals are the middle 95 % of 2,000
bootstrap samples of the turns.

`jobs` have an engine that computes nothing: what is left is what a job costs. `tokens` have the demo's model.
Scraper and dashboard share the machine here; in a cluster they run elsewhere, and only the worker's own time
and that of Redis counts. The bar is 0.98.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from redis import Redis
from rq import Queue
from rq.serializers import JSONSerializer

from ops.bench.queue import NoModelWorker
from ops.bench.report import print_machine
from ops.bench.table import print_table
from tests.redis_server import running_redis_server
from worker import BatchWorker
from worker.settings import WorkerSettings

MODEL = Path(__file__).parents[1] / "demo" / "model"
QUEUE = "watched"
SAMPLES = 2000
PROCESSES = ("worker", "redis", "page", "scraper")


class TokensWorker(BatchWorker):
    """Tells how many jobs it has ended when it is asked by a line on standard input."""

    def load_engine(self, settings: WorkerSettings) -> Any:
        threading.Thread(target=self._answer, daemon=True).start()
        return super().load_engine(settings)

    def _answer(self) -> None:
        for _ in sys.stdin:
            print(self._io.jobs_ended if self._io is not None else 0, flush=True)


class JobsWorker(TokensWorker, NoModelWorker):
    """The same with an instant engine."""


KINDS: Mapping[str, type[Any]] = {"jobs": JobsWorker, "tokens": TokensWorker}


def serve(kind: str, url: str) -> None:
    """Work until told to stop."""
    worker = KINDS[kind]([QUEUE], connection=Redis.from_url(url), serializer=JSONSerializer)
    worker.work(logging_level="WARNING")


def scrape(metrics_port: int, page_port: int) -> None:
    """Beat as often as the last line on standard input says; print the number of beats after each line."""
    every_s, beats, told = [0.0], 0, threading.Event()

    def listen() -> None:
        for line in sys.stdin:
            every_s[0] = 1 / float(line) if float(line) else 0.0
            print(beats, flush=True)
            told.set()

    threading.Thread(target=listen, daemon=True).start()
    while True:
        if told.wait(every_s[0] or None):
            told.clear()
            continue
        _read(f"http://127.0.0.1:{metrics_port}/metrics")
        if beats % 2:
            _read(f"http://127.0.0.1:{page_port}/")
            _read(f"http://127.0.0.1:{page_port}/series.json")
        beats += 1


def _read(url: str) -> None:
    with suppress(OSError), urllib.request.urlopen(url, timeout=60) as reply:  # the others may be ending
        reply.read()


@dataclass(frozen=True)
class Slice:
    """One piece of work: the processes' processor seconds, beats, and seconds by the clock."""

    cpu_s: Mapping[str, float]
    beats: int
    seconds: float

    def cpu(self, names: Sequence[str]) -> float:
        return sum(self.cpu_s[name] for name in names)


class Bench:
    """A worker, its Redis, a dashboard and a scraper, all alive."""

    def __init__(self, redis: Redis, kind: str, jobs: int, processes: Mapping[str, Any]) -> None:
        self._queue = Queue(QUEUE, connection=redis, serializer=JSONSerializer)
        self._kind, self._jobs, self._processes = kind, jobs, processes
        self._clocks = {name: _cpu_clock(processes[name].pid) for name in PROCESSES}
        self._number = 0

    def slice(self, beats_per_s: float) -> Slice:
        """Have the worker do one piece of work, watched so."""
        watchers = [self._processes[name] for name in ("page", "scraper")]
        if beats_per_s:
            for process in watchers:
                process.send_signal(signal.SIGCONT)
            beats = self._told("scraper", f"{beats_per_s:g}")
        before, began = self._cpu_s(), time.perf_counter()
        self._work()
        seconds, after = time.perf_counter() - began, self._cpu_s()
        if beats_per_s:
            beats = self._told("scraper", "0") - beats
            for process in watchers:
                process.send_signal(signal.SIGSTOP)
        return Slice(
            {name: after[name] - before[name] for name in PROCESSES}, beats if beats_per_s else 0, seconds
        )

    def _work(self) -> None:
        sampling = {"max_tokens": 1, "temperature": 0}
        if self._kind == "tokens":
            sampling = {"max_tokens": 64, "temperature": 0, "ignore_eos": True}
        done = self._told("worker", "") + self._jobs
        for start in range(0, self._jobs, 1000):
            calls = [(self._prompt(),) for _ in range(start, min(start + 1000, self._jobs))]
            self._queue.enqueue_many(
                [
                    Queue.prepare_data("jobs.complete", call, sampling, timeout=-1, result_ttl=10)
                    for call in calls
                ]
            )
        while self._told("worker", "") < done:
            time.sleep(0.005)

    def _prompt(self) -> str:
        self._number += 1
        return f"Monday, {1 + self._number % 28} May {1000 + self._number}"

    def _told(self, name: str, line: str) -> int:
        process = self._processes[name]
        process.stdin.write(f"{line}\n")
        process.stdin.flush()
        while not (line := process.stdout.readline().strip()).isdecimal():
            if process.poll() is not None:
                raise RuntimeError(f"the {name} has ended")
            print(line, file=sys.stderr)  # the worker's log
        return int(line)

    def _cpu_s(self) -> dict[str, float]:
        return {name: time.clock_gettime(clock) for name, clock in self._clocks.items()}


def _cpu_clock(pid: int) -> int:
    """Return the clock of a process's processor time, in nanoseconds: clock_getcpuclockid(3)."""
    return (~pid << 3) | 2


@contextmanager
def running(kind: str, jobs: int, url: str) -> Iterator[Bench]:
    """Start what there is to measure; stop it at the end."""
    port, page_port = free_port(), free_port()
    environment = {
        **os.environ,
        "TOKENMILL_MODEL": str(MODEL) if kind == "tokens" else "none",
        "TOKENMILL_MAX_NUM_SEQS": "128",
        "TOKENMILL_METRICS_PORT": str(port),
    }
    this = [sys.executable, "-m", "ops.bench.watched"]
    page = [sys.executable, "-c", "from jobs.cli import main; main()", "--url", url, "dashboard"]
    commands = {
        "worker": [*this, "--kind", kind, "--serve", "--url", url],
        "page": [*page, "--port", str(page_port)],
        "scraper": [*this, "--scrape", str(port), str(page_port)],
    }
    with Redis.from_url(url) as redis, ExitStack() as stack:
        processes: dict[str, Any] = {"redis": _Process(int(redis.info()["process_id"]))}
        for name, command in commands.items():
            pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            if name == "page":
                pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            processes[name] = subprocess.Popen(command, env=environment, **pipes)
            stack.callback(_stop, processes[name])
        _wait_for(lambda: redis.scard(f"rq:workers:{QUEUE}"))
        for each in (port, page_port):
            _wait_for(partial(_listens, each))
        yield Bench(redis, kind, jobs, processes)


@dataclass(frozen=True)
class _Process:
    """One that somebody else has started."""

    pid: int


def _stop(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGCONT)
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(30)
    process.kill()
    process.wait()


def _wait_for(is_there: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 120
    while not is_there():
        if time.monotonic() > deadline:
            raise RuntimeError("a process did not come up")
        time.sleep(0.1)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def interval(turns: Sequence[Any], figure: Callable[[Sequence[Any]], float]) -> str:
    """Return a figure of the turns, and between which two it is in the middle 95 % of bootstrap samples."""
    rng = random.Random(0)
    found = sorted(figure(rng.choices(turns, k=len(turns))) for _ in range(SAMPLES))
    low, high = found[SAMPLES // 40], found[-SAMPLES // 40]
    return f"{figure(turns):.4f} ({low:.4f}..{high:.4f})"


Turn = tuple[Slice, Slice]


def beat_s(turns: Sequence[Turn], names: Sequence[str]) -> float:
    """Return the processor seconds that a beat costs these processes. turns: unwatched, and watched."""
    return statistics.fmean(
        (watched.cpu(names) - alone.cpu(names)) / max(1, watched.beats) for alone, watched in turns
    )


def ratio(turns: Sequence[Turn], names: Sequence[str]) -> float:
    """Return the work of these processes for the same processor time, with one beat a second, to without.

    For as long as the worker takes on one core, so many beats come.
    """
    own = statistics.fmean(alone.cpu(names) for alone, _ in turns)
    beats = statistics.fmean(alone.cpu_s["worker"] for alone, _ in turns)
    return own / (own + beats * beat_s(turns, names))


GROUPS: Mapping[str, Sequence[str]] = {
    "worker": ("worker",),
    "worker and Redis": ("worker", "redis"),
    "the whole machine": PROCESSES,
}


def main() -> None:
    """Take the turns; print what a beat costs, and the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--kind", choices=KINDS, default="jobs")
    parser.add_argument("--turns", type=int, default=25)
    parser.add_argument("--jobs", type=int, help="of a piece of work; default: 5,000, of `tokens` 384")
    parser.add_argument("--often", type=float, default=10.0, help="beats a second of the third kind")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--scrape", type=int, nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.kind, options.url)
    elif options.scrape:
        scrape(*options.scrape)
    else:
        print_machine()
        _measure(options.kind, options.turns, options.jobs, options.often)


def _measure(kind: str, number: int, jobs: int | None, often: float) -> None:
    jobs = jobs or {"jobs": 5000, "tokens": 384}[kind]
    rng = random.Random(1)
    with running_redis_server() as url, running(kind, jobs, url) as bench:
        for beats in (0.0, often):
            bench.slice(beats)  # the first ones of a process take longer
        turns = []
        for _ in range(number):
            order = rng.sample([0.0, 1.0, often], 3)
            turns.append({beats: bench.slice(beats) for beats in order})
    alone = [turn[0.0] for turn in turns]
    seconds = statistics.median(each.seconds for each in alone)
    cpu_s = statistics.median(each.cpu_s["worker"] for each in alone)
    print(
        f"{kind}: {number} turns of {jobs} jobs, unwatched {seconds:.2f} s, of the worker {cpu_s:.3f} CPU s"
    )
    rows = []
    for beats in (1.0, often):
        pairs = [(turn[0.0], turn[beats]) for turn in turns]
        rate = sum(s.beats for _, s in pairs) / sum(s.seconds for _, s in pairs)
        costs = [f"{1e3 * beat_s(pairs, [name]):.2f}" for name in PROCESSES]
        ratios = [interval(pairs, partial(ratio, names=names)) for names in GROUPS.values()]
        rows.append([f"{rate:.1f}", *costs, *ratios])
    print_table(["beats a second", *(f"{name}, ms a beat" for name in PROCESSES), *GROUPS], rows)


if __name__ == "__main__":
    main()
