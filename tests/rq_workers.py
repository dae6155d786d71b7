"""`rq worker` in real subprocesses against a real Redis, for the tests of workers and of the whole."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from redis import Redis
from rq import Queue
from rq.job import Job, JobStatus
from rq.registry import StartedJobRegistry
from rq.results import Result
from rq.serializers import JSONSerializer

ROOT = Path(__file__).parents[1]
RQ = (sys.executable, "-m", "rq.cli")
Process = subprocess.Popen[str]


class Workers:
    """Starts `rq` commands against one server, and ends what it started."""

    worker_class = "tests.worker.fake_engine.FakeEngineWorker"

    def __init__(self, url: str, folder: Path) -> None:
        self.url, self.folder = url, folder
        self.redis = Redis.from_url(url, socket_timeout=None)  # `result` says how long it waits
        self.processes: list[Process] = []
        self._num_commands = 0

    def environment(self, **extra: str) -> dict[str, str]:
        """A worker's environment: the server, a model name, and the tests' functions on the allow list."""
        return {
            **{k: v for k, v in os.environ.items() if not k.startswith(("TOKENMILL_", "RQ_"))},
            "RQ_REDIS_URL": self.url,
            "TOKENMILL_MODEL": "fake",
            "TOKENMILL_LEASE_S": "2",
            "TOKENMILL_LOG_FORMAT": "text",
            "TOKENMILL_MAX_NUM_SEQS": "64",
            "TOKENMILL_ALLOWED_FUNCTIONS": ",".join(
                f"tests.worker.functions.{name}" for name in _test_functions()
            ),
            "PYTHONPATH": f"{ROOT / 'tests' / 'without_pandas'}{os.pathsep}{ROOT}",
            **extra,
        }

    def start(
        self,
        *args: str,
        queues: tuple[str, ...] = ("high", "bulk"),
        serializer: tuple[str, ...] = ("-S", "json"),
        cwd: Path | None = None,
        command: str = "worker",
        worker_class: str | None = None,
        **env: str,
    ) -> Process:
        """Start `rq worker` or another of RQ's commands; its log is in `log(process)`."""
        options = ["--worker-class", worker_class or self.worker_class, *serializer, *args]
        output = self._log(len(self.processes))
        arguments = [command, *options, *queues]
        process = self.run_command(arguments, output, cwd or self.folder, self.environment(**env))
        self.processes.append(process)
        return process

    def run_command(
        self, arguments: Sequence[str], output: Path, cwd: Path, env: Mapping[str, str]
    ) -> Process:
        """Start `rq` with these arguments; output: the file that gets what it prints."""
        with output.open("w") as log:
            return subprocess.Popen(
                [*RQ, *arguments], env=env, cwd=cwd, stdout=log, stderr=subprocess.STDOUT, text=True
            )

    def burst(self, *args: str, **kwargs: Any) -> str:
        """Run a burst worker to its end; return its log. Fails where it exits with an error."""
        process = self.start("--burst", *args, **kwargs)
        code = process.wait(timeout=60)
        log = self.log(process)
        assert code == 0, log
        return log

    def log(self, process: Process) -> str:
        """What a worker has printed so far."""
        return self._log(self.processes.index(process)).read_text()

    def _log(self, number: int) -> Path:
        return self.folder / f"worker-{number}.log"

    def rq(self, *args: str, **env: str) -> str:
        """Run another `rq` command; return its output. Fails where it exits with an error."""
        self._num_commands += 1
        output = self.folder / f"rq-{self._num_commands}.log"
        process = self.run_command(args, output, self.folder, self.environment(**env))
        code = process.wait(timeout=60)
        assert code == 0, output.read_text()
        return output.read_text()

    def queue(self, name: str) -> Queue:
        return Queue(name, connection=self.redis, serializer=JSONSerializer)

    def job(self, job_id: str) -> Job:
        return Job.fetch(job_id, connection=self.redis, serializer=JSONSerializer)

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.wait()

    def wait_for(self, key: str, timeout_s: int = 60) -> str:
        """Block until somebody pushes to a Redis list; return what it was."""
        found = self.redis.blpop([key], timeout=timeout_s)
        assert found is not None, f"nothing came to {key} in {timeout_s} s"
        return found[1].decode()

    def result(self, job: Job, timeout_s: int = 60) -> Result:
        """Block until a job has a result."""
        result = job.latest_result(timeout=timeout_s)
        assert result is not None, f"job {job.id} has no result after {timeout_s} s"
        return result


def _test_functions() -> list[str]:
    source = (ROOT / "tests" / "worker" / "functions.py").read_text()
    return re.findall(r"^(?:async )?def (\w+)", source, re.MULTILINE)


def leftovers(redis: Redis, *queues: str) -> list[str]:
    """Whatever of started jobs, executions and intermediate queues is still in Redis."""
    found = [key.decode() for key in redis.scan_iter("rq:execution*")]
    found += [key.decode() for key in redis.scan_iter("rq:queue:*:intermediate")]
    found += [
        member.decode()
        for key in redis.scan_iter("tokenmill:held:*")
        for member in redis.hkeys(key)
    ]
    for name in queues:
        registry = StartedJobRegistry(name, connection=redis, serializer=JSONSerializer)
        found += registry.get_job_ids(cleanup=False)
    return found


def assert_nothing_held(redis: Redis) -> None:
    """Once every worker has left by itself, nothing of them or of what they held is in Redis."""
    ours = "tokenmill:held:*"
    for pattern in (
        "rq:wip:*",
        "rq:execution:*",
        "rq:executions:*",
        "rq:queue:*:intermediate",
        ours,
    ):
        assert list(redis.scan_iter(pattern)) == []
    assert list(redis.scan_iter("rq:workers*")) == []
    assert list(redis.scan_iter("rq:scheduler*")) == []
    for key in redis.scan_iter("rq:worker:*"):
        assert redis.hexists(key, "death")
        assert 0 < redis.ttl(key) <= 60, "RQ shows a worker for a minute after its end"


def text_of(result: Result) -> str:
    return str(result.return_value["choices"][0]["text"])


def stats_of(workers: Workers, name: str) -> dict[str, Any]:
    """What a worker last said of itself."""
    return dict(json.loads(workers.redis.get(f"tokenmill:worker:{name}") or b"{}"))


def wait_until(condition: Callable[[], object], timeout_s: float = 60) -> None:
    """Return once a condition on Redis holds; nothing announces such a change."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def signal_until_it_ends(process: Process, number: signal.Signals, timeout_s: float = 60) -> int:
    """Signal a worker again and again; return its exit status. What comes within a second of the first signal
    counts as that one, sent twice."""
    deadline = time.monotonic() + timeout_s
    while True:
        process.send_signal(number)
        try:
            return process.wait(timeout=1.1)
        except subprocess.TimeoutExpired:
            assert time.monotonic() < deadline, "it did not end"


def wait_until_started(*jobs: Job) -> None:
    """Return once a worker holds all these jobs."""
    wait_until(lambda: all(job.get_status() == JobStatus.STARTED for job in jobs))
