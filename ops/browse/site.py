"""What the browser looks at: Redis, workers and the dashboard, each a process that can be ended and begun."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from itertools import chain
from pathlib import Path

import pyarrow.parquet as pq
from redis import Redis
from rq import Queue

from ops.redis_server import server_command, socket_in, socket_url, wait_until_ready

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 400.0

#: A function of jobs that fail until somebody has mended what they miss.
FUNCTION = "os.path.getsize"


class Site:
    """Processes in one folder."""

    def __init__(self, folder: Path, **dashboard_env: str) -> None:
        self.folder, self.url = folder, socket_url(socket_in(folder))
        self.data = folder / "data"
        self.data.mkdir()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._dashboard_env = dashboard_env
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self.address = f"http://127.0.0.1:{self._port}"
        self.redis = Redis.from_url(self.url, socket_timeout=None)

    def start_redis(self) -> None:
        self._start("redis", server_command(self.folder, socket_in(self.folder)))
        wait_until_ready(self.url)

    def start_dashboard(self) -> None:
        main = "from jobs.cli import main; main()"
        command = [sys.executable, "-c", main, "dashboard", "--port", str(self._port)]
        self._start("dashboard", command, **self._dashboard_env)
        wait_until(self._answers, "the dashboard answers")

    def start_worker(self, name: str, worker_class: str = "worker.BatchWorker", **env: str) -> None:
        command = [
            sys.executable,
            "-m",
            "rq.cli",
            "worker",
            "--worker-class",
            worker_class,
            "-S",
            "json",
        ]
        self._start(
            name,
            [*command, "--name", name, "prompts", "bulk"],
            TOKENMILL_MODEL=str(ROOT / "ops" / "demo" / "model"),
            TOKENMILL_DATA_ROOTS=str(self.data),
            TOKENMILL_ALLOWED_FUNCTIONS=FUNCTION,
            TOKENMILL_TORCH_THREADS="1",
            TOKENMILL_MAX_NUM_SEQS="16",
            TOKENMILL_KV_CACHE_BYTES=str(64 << 20),
            TOKENMILL_LEASE_S="5",
            OMP_NUM_THREADS="1",
            **env,
        )

    def wait_for_worker(self, name: str) -> None:
        wait_until(lambda: self.redis.exists(f"tokenmill:worker:{name}"), f"worker {name} serves")

    def submit(self, rows_per_shard: int, max_tokens: int, copies: int, output: str = "out") -> str:
        """Submit a run over so many copies of the demo's rows; return its id."""
        source = (ROOT / "ops" / "demo" / "dates.parquet").read_bytes()
        folder = self.data / f"in-{output}"
        folder.mkdir(exist_ok=True)
        for i in range(copies):
            (folder / f"{i}.parquet").write_bytes(source)
        command = [sys.executable, "-c", "from jobs.cli import main; main()", "submit", str(folder)]
        command += [str(self.data / output), "--messages-column", "messages", "--temperature", "1.2"]
        command += ["--rows-per-shard", str(rows_per_shard), "--max-tokens", str(max_tokens)]
        done = subprocess.run(command, env=self._environment(), cwd=ROOT, check=True, capture_output=True)
        return done.stdout.decode().split()[0]

    def enqueue_failing(self, job_id: str) -> Path:
        """Enqueue a job that fails as long as a file is not there; return the file's path."""
        missing = self.data / "missing"
        queue = Queue("prompts", connection=self.redis, serializer="json")
        queue.enqueue(FUNCTION, str(missing), job_id=job_id)
        wait_until(lambda: self.redis.zscore("rq:failed:prompts", job_id), f"job {job_id} fails")
        return missing

    def check_output(self, rows: int, output: str = "out") -> None:
        """Raise AssertionError unless the run has ended with each row once, in the input's order."""
        folder = self.data / output
        assert (folder / "_SUCCESS").exists()
        inputs = sorted((self.data / f"in-{output}").iterdir())
        asked = list(chain.from_iterable(pq.read_table(path)["messages"].to_pylist() for path in inputs))
        table = pq.read_table(folder)
        assert table.num_rows == rows == len(asked), f"{table.num_rows} rows"
        assert table["messages"].to_pylist() == asked, "the rows are not those of the input"
        assert table["completion"].null_count == 0

    def enqueue(self, job_id: str, queue: str) -> None:
        """Enqueue a prompt."""
        Queue(queue, connection=self.redis, serializer="json").enqueue("jobs.complete", "x", job_id=job_id)

    def end(self, name: str, *, kill: bool = False) -> None:
        process = self._processes.pop(name)
        (process.kill if kill else process.terminate)()
        process.wait(timeout=60)

    def close(self) -> None:
        """End every process, Redis last."""
        for name in sorted(self._processes, key=lambda name: name == "redis"):
            with suppress(subprocess.TimeoutExpired):
                self.end(name, kill=name != "redis")
        self.redis.close()

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def _environment(self, **more: str) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("TOKENMILL_", "RQ_"))}
        return {**kept, "RQ_REDIS_URL": self.url, "TOKENMILL_LOG_FORMAT": "text", **more}

    def _start(self, name: str, command: list[str], **env: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                command, env=self._environment(**env), cwd=ROOT, stdout=log, stderr=subprocess.STDOUT
            )

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.address}/static/icon.svg", timeout=5):
                return True
        except OSError:
            return False


def wait_until(condition: Callable[[], object], told: str, timeout_s: float = WAIT_S) -> None:
    """Return once it holds. Raises AssertionError, which names it, where it does not."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:.0f} s: {told}"
        time.sleep(0.1)
