"""A Redis server and stub workers for one scenario, what they hold, and whether every answer came once."""

from __future__ import annotations

import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
from rq import Queue
from rq.results import Result
from rq.serializers import JSONSerializer

from ops.redis_server import server_command, wait_until_ready
from tests.rq_workers import Workers, leftovers, stats_of

CHUNK = 1000
MIB = 1 << 20


@dataclass(frozen=True)
class Sample:
    """What the site held at one moment: seconds since the first sample, bytes, and numbers, summed over the
    workers."""

    seconds: float
    rss_bytes: int
    open_files: int
    threads: int
    redis_bytes: int
    redis_keys: int
    done: int


class Site:
    """One server, and workers that come and go."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url, self.folder = url, folder
        self._workers = Workers(url, folder)
        self._workers.worker_class = "ops.load.stub_engine.StubWorker"
        self.redis = self._workers.redis
        self._names: dict[str, subprocess.Popen[str]] = {}

    def queue(self, name: str) -> Queue:
        return self._workers.queue(name)

    def start(self, name: str, *arguments: str, settings: Mapping[str, str] | None = None) -> None:
        """Start `rq worker --name <name> ... high bulk`; settings: its environment, or `worker_class`."""
        command: Any = self._workers.start
        self._names[name] = command("--name", name, *arguments, **(settings or {}))

    def wait_until_ready(self) -> None:
        """Return when every worker serves."""
        self.wait(lambda: all(self.redis.exists(f"tokenmill:worker:{name}") for name in self._names))

    def stop(self) -> dict[str, dict[str, Any]]:
        """End the workers with SIGTERM, or wait for those that end by themselves; return their last words."""
        for process in self._names.values():
            process.terminate()
        return self.join()

    def join(self, timeout_s: float = 120) -> dict[str, dict[str, Any]]:
        """Wait for workers that end by themselves; return their last words. Raises AssertionError."""
        for name, process in self._names.items():
            code = process.wait(timeout=timeout_s)
            assert code == 0, f"{name} ended with {code}:\n{self._workers.log(process)[-3000:]}"
        last = {name: stats_of(self._workers, name) for name in self._names}
        self._names.clear()
        return last

    def processes(self) -> list[subprocess.Popen[str]]:
        return list(self._names.values())

    def stats(self, name: str) -> dict[str, Any]:
        """What a worker last said of itself."""
        return stats_of(self._workers, name)

    def held(self) -> Counter[str]:
        """Jobs that each worker says it holds."""
        return Counter({name: self.stats(name).get("jobs_held", 0) for name in self._names})

    def eternal_keys(self) -> list[str]:
        """Keys that never expire, but for those that hold one entry for each queue, worker or waiting job, or
        entries that expire one by one."""
        lists = ("rq:queue:", "rq:workers:", "rq:finished:", "rq:failed:", "rq:wip:", "rq:canceled:")
        keys = [key.decode() for key in self.redis.scan_iter("*", count=1000)]
        return [
            key
            for key in keys
            if key not in ("rq:queues", "rq:workers")
            and not key.startswith(lists)
            and self.redis.ttl(key) == -1
        ]

    def keys_by_kind(self) -> Counter[str]:
        """Numbers of keys by the first two words of their names."""
        keys = self.redis.scan_iter("*", count=1000)
        return Counter(":".join(key.decode().split(":")[:2]) for key in keys)

    def rq(self, *arguments: str) -> str:
        """Run another `rq` command."""
        return self._workers.rq(*arguments)

    def wait(self, condition: Callable[[], object], timeout_s: float = 600) -> None:
        """Return once a condition holds. Raises AssertionError when a worker dies or the time is over."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            for name, process in self._names.items():
                if process.poll() not in (None, 0):
                    raise AssertionError(f"{name} died:\n{self._workers.log(process)[-3000:]}")
            assert time.monotonic() < deadline, f"not within {timeout_s:g} s"
            time.sleep(0.02)

    def sample(self, started: float, done: int) -> Sample:
        """Look at every worker that still runs, and at Redis."""
        rss = files = threads = 0
        for process in self._names.values():
            try:
                seen = psutil.Process(process.pid)
                held = seen.memory_info().rss, seen.num_fds(), seen.num_threads()
            except psutil.Error:  # it has just ended
                continue
            rss, files, threads = rss + held[0], files + held[1], threads + held[2]
        memory = self.redis.info("memory")["used_memory"]
        return Sample(time.monotonic() - started, rss, files, threads, memory, self.redis.dbsize(), done)

    @contextmanager
    def sampled(self, count: Callable[[], int], period_s: float = 0.25) -> Iterator[list[Sample]]:
        """Take samples in a thread until the body ends."""
        samples: list[Sample] = []
        started, over = time.monotonic(), threading.Event()

        def watch() -> None:
            while not over.wait(period_s):
                samples.append(self.sample(started, count()))

        thread = threading.Thread(target=watch, name="sampler")
        thread.start()
        try:
            yield samples
        finally:
            over.set()
            thread.join()

    def close(self) -> None:
        """End every process."""
        self._workers.close()
        self.redis.close()


@contextmanager
def site() -> Iterator[Site]:
    """A fresh site; its folder is gone afterwards."""
    with TemporaryDirectory(prefix="load-") as path:
        folder = Path(path)
        socket = folder / "s"
        server = subprocess.Popen(
            server_command(folder, socket), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            url = f"unix://{socket}"
            wait_until_ready(url)
            running = Site(url, folder)
            try:
                yield running
            finally:
                running.close()
        finally:
            server.terminate()
            server.wait()


def enqueue_prompts(
    queue: Queue, prompts: Sequence[str], sampling: dict[str, Any] | None = None, **options: Any
) -> list[str]:
    """Enqueue one `jobs.complete` for each prompt, of one token if not told otherwise; return their ids."""
    ids: list[str] = []
    for start in range(0, len(prompts), CHUNK):
        data = [
            Queue.prepare_data("jobs.complete", (prompt,), sampling or {"max_tokens": 1}, **options)
            for prompt in prompts[start : start + CHUNK]
        ]
        ids += [job.id for job in queue.enqueue_many(data)]
    return ids


@dataclass(frozen=True)
class Audit:
    """Jobs by how often they were answered, wrong answers among them, and which worker answered."""

    unanswered: int
    doubled: int
    wrong: int
    by_worker: Counter[str]


def audit(queue: Queue, asked: Iterable[tuple[str, str]]) -> Audit:
    """Compare (job id, prompt) pairs with the results in Redis."""
    asked = list(asked)
    unanswered = doubled = wrong = 0
    workers: Counter[str] = Counter()
    for start in range(0, len(asked), CHUNK):
        chunk = asked[start : start + CHUNK]
        with queue.connection.pipeline(transaction=False) as pipe:
            for job_id, _ in chunk:
                pipe.xrange(Result.get_key(job_id))  # type: ignore[no-untyped-call]
            for (job_id, prompt), entries in zip(chunk, pipe.execute(), strict=True):
                results = [_restore(queue, job_id, *entry) for entry in entries]
                unanswered += not results
                doubled += len(results) > 1
                wrong += any(_text(result) != f"echo:{prompt}" for result in results)
                workers.update(str(result.worker_name) for result in results)
    return Audit(unanswered, doubled, wrong, workers)


def unended(site: Site, *queues: str) -> int:
    """Executions and started jobs that are still in Redis."""
    return len(leftovers(site.redis, *queues))


def _restore(queue: Queue, job_id: str, result_id: bytes, fields: dict[bytes, bytes]) -> Result:
    return Result.restore(job_id, result_id.decode(), fields, queue.connection, JSONSerializer)


def _text(result: Result) -> str:
    value = result.return_value
    return str(value["choices"][0]["text"]) if isinstance(value, dict) else ""
