"""Processes forked from one that has imported what they need, as a new interpreter takes a second for that."""

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.rq_workers import Workers

FORK = multiprocessing.get_context("forkserver")
FORK.set_forkserver_preload(
    [
        "engine.engine",
        "engine.tensor_parallel.rank",
        "rq.cli",
        "tests.faults.harness",
        "tests.worker.functions",
        "tests.worker.slow_files",
        "worker.assembly",
        "worker.settings",
        "jobs.parquet.planning.planner",
    ]
)


class ForkedProcess:
    """A function in such a process; has what callers use of subprocess.Popen."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self.args: list[str] = [function.__name__]
        self._process = FORK.Process(target=function, args=arguments)
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status. Raises subprocess.TimeoutExpired."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self._process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkedModule(ForkedProcess):
    """`python -m MODULE` in such a process."""

    def __init__(
        self, module: str, arguments: Sequence[str], env: Mapping[str, str], cwd: Path, output: Path
    ) -> None:
        """output: the file that gets what it prints."""
        output.touch()
        super().__init__(_run, module, [*arguments], dict(env), cwd, output)
        self.args = [module, *arguments]


class ForkedWorkers(Workers):
    """Workers, and other commands of RQ's, that are forked from a process that has imported them."""

    def run_command(  # type: ignore[override]  # it is no Popen
        self, arguments: Sequence[str], output: Path, cwd: Path, env: Mapping[str, str]
    ) -> ForkedModule:
        return ForkedModule("rq.cli", arguments, env, cwd, output)


def _run(module: str, arguments: list[str], env: dict[str, str], cwd: Path, output: Path) -> None:
    """What `python -m` does, in the forked process."""
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    named = env.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [
        str(cwd),
        *filter(None, named),
        *(path for path in sys.path if path not in ("", *named)),
    ]
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)
