"""RQ's scheduler in a process of its own, which can be started again at any time."""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from redis import Redis
from redis.exceptions import RedisError
from rq import Queue
from rq.job import Job
from rq.logutils import setup_loghandlers
from rq.registry import ScheduledJobRegistry
from rq.scheduler import RQScheduler, run
from rq.utils import current_timestamp, now, utcformat

from worker._rq import OUTAGES, own_client

_REDIS_TIMEOUT_S, _PAUSE_S = 10.0, 2.0
_MOST = 1000
"""Scheduled jobs that are looked at in each round: as many as RQ takes."""

_CHILD = "import pickle, sys; sys.path[:] = pickle.load(sys.stdin.buffer); pickle.load(sys.stdin.buffer)()"
"""What the process runs: it finds modules where its worker does, and gets its task through its standard
input, because the connection's settings may hold a password."""


class SchedulerProcess:
    """What RQ uses of `multiprocessing.Process`, for a process that starts as a fresh interpreter.

    A worker with threads and a loaded model cannot fork: the child could inherit any of their locks.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        task = partial(_run, scheduler, os.getpid())
        handed_over = pickle.dumps(sys.path) + pickle.dumps(task)
        self._process = subprocess.Popen([sys.executable, "-c", _CHILD], stdin=subprocess.PIPE)
        assert self._process.stdin is not None
        try:
            with self._process.stdin as stdin:
                stdin.write(handed_over)
        except BrokenPipeError:
            return  # it has ended already: `is_alive` says so

    @property
    def pid(self) -> int:
        """The process' id."""
        return self._process.pid

    @property
    def exit_status(self) -> int | None:
        """What it ended with, the negative number of a signal that killed it; None while it runs."""
        return self._process.poll()

    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def join(self) -> None:
        """Wait for its end."""
        self._process.wait()


class Scheduler(RQScheduler):
    """RQ's scheduler, in a process that ends with its worker even if that is killed.

    It is always started, also while another worker has the locks, and takes them over when that one dies.
    """

    def __init__(
        self,
        queues: Sequence[Queue],
        connection: Redis,
        serializer: Any,
        *,
        logging_level: str | int,
        date_format: str,
        log_format: str,
    ) -> None:
        self._logging: dict[str, Any] = {
            "level": logging_level,
            "date_format": date_format,
            "log_format": log_format,
        }
        super().__init__(
            queues,
            connection,
            logging_level=logging_level,
            date_format=date_format,
            log_format=log_format,
            serializer=serializer,
        )

    def start(self) -> Any:
        """Start the process, or a new one where that has ended."""
        self._status = self.Status.STARTED
        self._connection = self._process = None  # neither can be handed to another process
        process: Any = SchedulerProcess(self)
        self._process = process
        return process

    def keep_alive(self) -> None:
        """Start the process again if it has ended."""
        process: Any = self._process
        if process is None or process.is_alive():
            return
        self.log.error("The scheduler ended (exit status %s): starting it again", process.exit_status)
        try:
            self.start()
        except OSError as error:  # such as "too many open files": no reason to end the worker
            self._process = process
            self.log.error("The scheduler cannot be started (%s): trying again", error)

    def enqueue_scheduled_jobs(self) -> None:
        """Enqueue what is due. RQ's own way ends the scheduler at the first job that it cannot read: such
        a one is queued as it stands, for a worker to fail it by name."""
        if not self._scheduled_job_registries and self._acquired_locks:
            self.prepare_registries()
        for registry in self._scheduled_job_registries:
            for raw in self._unreadable(registry):
                self.log.error("Scheduled job %r cannot be read: it is queued as it stands", raw)
                with self.connection.pipeline() as pipe:
                    pipe.hset(b"rq:job:" + raw, mapping={"status": "queued", "enqueued_at": utcformat(now())})
                    pipe.rpush(f"rq:queue:{registry.name}", raw)
                    pipe.zrem(registry.key, raw)
                    pipe.execute(raise_on_error=False)
        super().enqueue_scheduled_jobs()

    def _unreadable(self, registry: ScheduledJobRegistry) -> list[bytes]:
        """The ids that are due and whose jobs RQ's client cannot read or write."""
        due: Any = self.connection.zrangebyscore(registry.key, 0, current_timestamp(), 0, _MOST)
        if not due or self._can_enqueue(due):
            return []
        return [raw for raw in due if not self._can_enqueue([raw])]

    def _can_enqueue(self, raw_ids: Sequence[bytes]) -> bool:
        try:
            for job in Job.fetch_many([raw.decode() for raw in raw_ids], self.connection, self.serializer):
                if job is not None:
                    job.to_dict()  # RQ writes it anew
        except OUTAGES:
            raise
        except Exception:  # noqa: BLE001  # a hash may hold anything
            return False
        return True

    def work(self) -> None:
        """Run until stopped, or until the worker is gone; RQ's own ends with the first error of Redis."""
        setup_loghandlers(name=self.log.name, **self._logging)
        self._install_signal_handlers()
        client: Any = own_client(self.connection, _REDIS_TIMEOUT_S)
        self._connection = client
        while True:
            try:
                self.acquire_locks()  # under the same name, also those of a process that was killed
                super().work()
            except RedisError as error:
                if self._stop_requested:
                    return
                self.log.error("the scheduler: Redis did not answer (%s); trying again", error)
                time.sleep(_PAUSE_S)
            else:
                return


def _run(scheduler: Scheduler, worker_pid: int) -> None:
    """Be the scheduler's process: end with the worker, whatever ends it."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)
    if os.getppid() == worker_pid:
        run(scheduler)
