"""Workers and commands of two versions, side by side against one Redis."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from redis import Redis

from jobs.watch.samples import WorkerSample, read_samples
from tests.rq_suite.sdist import rq_2

ROOT = Path(__file__).parents[2]
QUEUES = ("prompts", "bulk")


@dataclass(frozen=True)
class Version:
    """One state of the code. name: what its workers' names begin with."""

    name: str
    tree: Path

    @property
    def import_path(self) -> str:
        """Where its modules are found first, and RQ 2.12 where it asks for that. Raises CannotFetch."""
        needs_2 = '"rq>=2.12,<3"' in (self.tree / "pyproject.toml").read_text()
        return os.pathsep.join(map(str, (rq_2(), self.tree) if needs_2 else (self.tree,)))


@dataclass
class Worker:
    """A started worker. must_exit: the status it is expected to leave with; None while it should run."""

    name: str
    version: Version
    process: subprocess.Popen[bytes]
    log: Path
    must_exit: int | None = None


class Fleet:
    """Starts what it is told to, and ends it all when it is left."""

    def __init__(self, url: str, folder: Path) -> None:
        self.redis: Redis = Redis.from_url(url, socket_timeout=None)
        self.folder = Path(folder) / f"fleet-{len(list(folder.glob('fleet-*')))}"
        self.folder.mkdir()
        self.workers: list[Worker] = []
        self._url = url

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self.workers:
            if worker.process.poll() is None:
                worker.process.kill()  # also one that is frozen
            worker.process.wait()
        self.redis.close()

    def start(self, version: Version) -> Worker:
        """Start a worker of a version. Its settings are those that all versions know."""
        name = f"{version.name}-{1 + len(self.workers)}"
        options = ["--worker-class", "worker.BatchWorker", "-S", "json", "--with-scheduler", "--name", name]
        log = self.folder / f"{name}.log"
        settings = {
            "TOKENMILL_MODEL": str(ROOT / "ops" / "demo" / "model"),
            "TOKENMILL_DATA_ROOTS": str(self.folder),
            "TOKENMILL_MAX_NUM_SEQS": "8",
            "TOKENMILL_TORCH_THREADS": "1",
            "TOKENMILL_KV_CACHE_BYTES": "64MiB",
            "TOKENMILL_LEASE_S": "5",
            "TOKENMILL_DRAIN_S": "1",
        }
        with log.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "rq.cli", "worker", *options, *QUEUES],
                env=self._environment(version, settings),
                cwd=self.folder,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        self.workers.append(Worker(name, version, process, log))
        return self.workers[-1]

    def command(self, version: Version, *arguments: str) -> str:
        """Run `tokenmill` of a version; return its output. Raises CalledProcessError."""
        code = "from jobs.cli import main; main()"
        return subprocess.run(
            [sys.executable, "-P", "-c", code, *arguments],
            env=self._environment(version, {}),
            cwd=self.folder,
            check=True,
            capture_output=True,
            text=True,
        ).stdout

    def sample(self, worker: Worker) -> WorkerSample | None:
        """What a worker last told of itself, whatever its version."""
        return next(iter(read_samples(self.redis, [worker.name])), None)

    def _environment(self, version: Version, settings: Mapping[str, str]) -> dict[str, Any]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("TOKENMILL_", "RQ_"))}
        return {**kept, "PYTHONPATH": version.import_path, "RQ_REDIS_URL": self._url, **settings}
