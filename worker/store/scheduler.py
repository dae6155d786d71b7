"""RQ's scheduler in a process of its own, which can be started again at any time."""

from __future__ import annotations

import copyreg
import ctypes
import logging
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from functools import partial
from typing import Any

from redis import Redis
from redis.exceptions import RedisError
from redis.sentinel import Sentinel, SentinelConnectionPool, SentinelConnectionPoolProxy
from rq import Queue
from rq.scheduler import RQScheduler, run
from rq.utils import current_timestamp, now, utcformat

from worker.logs import LogStyle
from worker.store.client import own_client
from worker.store.scripts import Call, Scripts

_REDIS_TIMEOUT_S, _PAUSE_S = 10.0, 2.0
_REACQUIRE_S = 10.0
_MOST = 1000
"""Scheduled jobs that are enqueued in each round: as many as RQ takes."""

_CHILD = "import pickle, sys; sys.path[:] = pickle.load(sys.stdin.buffer); pickle.load(sys.stdin.buffer)()"
"""What the process runs: it finds modules where its worker does, and gets its task through its standard
input, because the connection's settings may hold a password."""


def _who_knows_the_master(proxy: SentinelConnectionPoolProxy) -> tuple[Any, ...]:
    """Take from a connection's settings what another process needs to ask the same Sentinels."""
    manager: Any = proxy.sentinel_manager
    asked = [each.connection_pool.connection_kwargs for each in manager.sentinels]
    addresses = [(each["host"], each["port"]) for each in asked]
    return _ask_for_master, (proxy.service_name, addresses, manager.sentinel_kwargs)


def _ask_for_master(name: str, addresses: list[Any], options: dict[str, Any]) -> Any:
    sentinels: Any = Sentinel(addresses, sentinel_kwargs=options)
    pool: Any = SentinelConnectionPool(name, sentinels)
    return pool.proxy


copyreg.pickle(SentinelConnectionPoolProxy, _who_knows_the_master)


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
        self, queues: Sequence[Queue], connection: Redis, serializer: Any, style: LogStyle, worker: str
    ) -> None:
        """style: of the worker's log, which the scheduler's process writes too. worker: its name."""
        self._scripts: Scripts | None = None
        self._style, self._worker = style, worker
        super().__init__(
            queues,
            connection,
            logging_level=style.level or logging.INFO,
            date_format=style.date_format,
            log_format=style.log_format,
            serializer=serializer,
        )

    def start(self) -> Any:
        """Start the process, or a new one where that has ended."""
        self._status = self.Status.STARTED
        # None of these can be handed to another process.
        self._connection = self._process = self._scripts = None
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

    @property
    def should_reacquire_locks(self) -> bool:
        """Whether to try for the locks that it lacks: RQ waits for minutes, also after one was damaged."""
        taken: Any = self.lock_acquisition_time
        if self._queue_names == self.acquired_locks:
            return False
        return taken is None or (datetime.now() - taken).total_seconds() > _REACQUIRE_S

    def enqueue_scheduled_jobs(self) -> None:
        """Enqueue what is due. RQ's own way ends the scheduler at the first job that it cannot read, and
        loses what is due where the key of its queue is damaged."""
        if self._scripts is None:
            self._scripts = Scripts(self.connection)
        moment = {"now_iso": utcformat(now()), "now_ts": str(current_timestamp())}
        same = {**moment, "registry": "scheduled", "most": _MOST}
        self._scripts.call_many(
            [Call("enqueue_due", {"queue": name, **same}) for name in sorted(self._acquired_locks)]
        )

    def work(self) -> None:
        """Run until stopped, or until the worker is gone; RQ's own ends with the first error of Redis."""
        self._style.start(self._worker, self.log.name)
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
