"""BatchWorker: an RQ worker that runs many jobs at once through one engine."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import signal
import socket
import time
from contextlib import closing
from datetime import timedelta
from importlib.metadata import version
from types import FrameType
from typing import TYPE_CHECKING, Any

from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError
from rq import Queue, worker_registration
from rq.defaults import DEFAULT_LOGGING_DATE_FORMAT, DEFAULT_LOGGING_FORMAT
from rq.job import Job
from rq.serializers import JSONSerializer
from rq.utils import now, utcformat
from rq.worker.base import BaseWorker, DequeueStrategy, WorkerStatus

import jobs
from jobs.common.display import shown_error
from jobs.common.plain_log import AUTO, VARIABLE, remove_handlers
from worker.errors import ForeignJobsPackage, NameTaken, StartupError
from worker.io_thread.limits import LEASE_MARGIN_S, Limits
from worker.logs import LastingTrouble, start_log
from worker.start import (
    called_by_rq_command,
    leave_out_working_directory,
    load_functions,
    load_parts,
    share_freed_memory,
    spin_briefly,
)
from worker.store.client import MIN_REDIS_VERSION
from worker.store.scheduler import Scheduler
from worker.store.worker_record import end_leases_of, living_namesake, shown_loading, successor

if TYPE_CHECKING:
    from engine import Engine
    from worker.io_thread.io_loop import IoLoop
    from worker.metrics.server import MetricsServer
    from worker.settings import WorkerSettings
    from worker.traces.otel import OtelTraces


_UNSUBSCRIBE_S = 5.0
"""Seconds that the worker waits for the end of the subscriber's thread."""

_LISTEN_AGAIN_S = 2.0
"""Seconds that the subscriber's thread waits after an error."""


class BatchWorker(BaseWorker):
    """An RQ worker that packs its jobs into one continuous batch.

    The main thread loads and steps the engine, and handles signals. One I/O thread claims and ends jobs. User
    functions, callbacks and files have threads of their own. The constructor loads nothing, because `rq info` builds
    workers too. If the worker cannot serve, `work()` raises StartupError. Under `rq worker` it logs one line instead,
    and exits with 1.
    """

    _io: IoLoop | None = None
    _metrics: MetricsServer | None = None
    _traces: OtelTraces | None = None
    _is_cold = False  # a cold shutdown was asked for
    _is_stopped_early = False  # a shutdown was asked for before the loops ran
    _has_lost_name = False  # another worker was started under this worker's name

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._listening_trouble = LastingTrouble(self.log, "listening for commands again")

    def load_engine(self, settings: WorkerSettings) -> Engine:
        """Load the model. Override this to serve with another engine."""
        import torch

        from engine import Engine

        if settings.torch_threads is not None:
            torch.set_num_threads(settings.torch_threads)
        engine = Engine(settings.engine_config())
        # The engine's objects are never freed. Unless they are frozen, each garbage collection delays a step by 0.2 s.
        gc.collect()
        gc.freeze()
        return engine

    def work(
        self,
        burst: bool = False,
        logging_level: str | None = None,
        date_format: str = DEFAULT_LOGGING_DATE_FORMAT,
        log_format: str = DEFAULT_LOGGING_FORMAT,
        max_jobs: int | None = None,
        max_idle_time: int | None = None,
        with_scheduler: bool = False,
        dequeue_strategy: DequeueStrategy = DequeueStrategy.DEFAULT,
    ) -> bool:
        """Serve the queues until the worker must stop. The arguments are those of `rq worker`.

        Returns whether any job has ended here. Raises StartupError if the worker cannot start; then it has claimed no
        job. Raises EngineFailed, IoThreadFailed, FaultySurroundings or TooManyStuckThreads if the worker cannot go on,
        and SystemExit on a cold shutdown.
        """
        leave_out_working_directory()
        from worker.settings import read_variable

        formats = date_format, log_format
        try:
            # RQ's `bootstrap` would set up the log too late.
            writes_json = start_log(
                self.name, read_variable(VARIABLE) or AUTO, logging_level, formats
            )
            settings = self._check_start(dequeue_strategy)
            self._metrics = self._listen(settings)
        except StartupError as error:
            self._exit_under_rq_command(error)
            raise
        share_freed_memory()
        spin_briefly(os.environ)
        self._install_signal_handlers()
        if with_scheduler:
            self._start_scheduler(burst, logging_level, date_format, log_format)
        try:
            load_began_at = time.monotonic()
            loading = shown_loading(
                self.connection, self.name, self.queue_names(), settings.model_name, settings.model
            )
            with loading, closing(self._load(settings)) as engine:
                if writes_json:
                    remove_handlers("transformers")  # importing it adds a handler
                self._log_ready(engine, settings, time.monotonic() - load_began_at)
                self._exit_if_stopped()
                self._sign_on(logging_level, date_format, log_format)
                try:
                    return self._serve(engine, settings, burst, max_jobs, max_idle_time)
                finally:
                    self._sign_off()
        finally:
            if self.scheduler:
                self.scheduler.stop()
            if self._metrics is not None:
                self._metrics.close()
            if self._traces is not None:
                self._traces.close()

    def _listen(self, settings: WorkerSettings) -> MetricsServer | None:
        """Start and return the metrics server; None if the settings turn metrics off. Raises MetricsNotServed."""
        if not settings.metrics_port:
            return None
        from worker.metrics.server import MetricsServer

        server = MetricsServer(settings.metrics_host, settings.metrics_port)
        self.log.info(
            "Worker %s: metrics at http://%s:%d/metrics",
            self.name,
            settings.metrics_host,
            server.port,
        )
        return server

    def _load(self, settings: WorkerSettings) -> Engine:
        """Import the code that jobs run, and load the model, before any thread runs jobs."""
        from engine import ConfigError

        try:
            # Users' functions come first: a wrong name is then reported at once, not after the model is loaded.
            load_functions(settings.allowed_functions)
            load_parts()
            return self.load_engine(settings)
        except (StartupError, ConfigError) as error:
            self._exit_under_rq_command(error)
            raise

    def _log_ready(self, engine: Engine, settings: WorkerSettings, seconds: float) -> None:
        """Log which model is served. seconds: how long it took to load."""
        served = settings.served_model(
            engine.identity, engine.attention_backend, engine.max_model_len
        )
        self.log.info(
            "Worker %s: model ready after %.1f s: %s, attention backend %s, Tokenmill %s",
            self.name,
            seconds,
            served,
            served.attention_backend,
            version("tokenmill"),
        )

    def _exit_under_rq_command(self, error: Exception) -> None:
        """If RQ's command runs this worker, log a startup error in one line and exit, so that RQ prints no traceback.

        Otherwise return, and the caller raises the error. If an `rq worker-pool` started this process, the pool is
        stopped first.
        """
        self._stop_pool(error)
        if called_by_rq_command():
            from worker.settings import with_variables

            self.log.error("Worker %s cannot start: %s", self.name, with_variables(str(error)))
            raise SystemExit(1)

    def _stop_pool(self, error: Exception) -> None:
        """Stop the `rq worker-pool` that started this process, if any, because all of its workers would fail too."""
        pool = multiprocessing.parent_process()
        is_in_pool = "WorkerPool" in multiprocessing.current_process().name
        if is_in_pool and pool is not None and pool.pid is not None:
            self.log.error(
                "Worker %s: stopping the pool, none of its workers can start: %s", self.name, error
            )
            os.kill(pool.pid, signal.SIGTERM)

    def _sign_on(self, level: str | None, *formats: str) -> None:
        """Add the worker to RQ's lists. If the connection is lost meanwhile, try once more."""
        try:
            self.bootstrap(level, *formats)
        except RedisConnectionError:
            # Without this call, RQ would mistake this worker's first entry for another worker of the same name.
            self.register_death()
            self.bootstrap(level, *formats)

    def _sign_off(self) -> None:
        """Take the worker off RQ's lists. If the server does not answer, the entry expires."""
        steps = [self.register_death, self.unsubscribe]
        if self._has_lost_name:  # the entry in the lists belongs to another worker now
            steps = [self.unsubscribe]
        for step in steps:
            try:
                step()
            except RedisError as error:
                self.log.error(
                    "Worker %s: could not sign off in Redis: %s", self.name, shown_error(error)
                )

    def _check_start(self, dequeue_strategy: DequeueStrategy) -> WorkerSettings:
        """Check RQ's options and Redis' version, take this worker's name, and return the settings.

        Raises StartupError if one of these cannot be used.
        """
        from worker.settings import WorkerSettings

        if not getattr(jobs, "__tokenmill__", False):
            raise ForeignJobsPackage(str(getattr(jobs, "__file__", jobs)))
        if self.serializer is not JSONSerializer:
            raise StartupError(
                "this worker reads JSON payloads only: start it with `rq worker -S json ...` "
                "(a pickle payload is never loaded)"
            )
        if dequeue_strategy != DequeueStrategy.DEFAULT:
            raise StartupError(
                f"--dequeue-strategy {dequeue_strategy} is not supported: queues are lanes here, "
                "served in the order given"
            )
        if self.job_class is not Job:
            raise StartupError(
                f"--job-class {self.job_class.__module__}.{self.job_class.__qualname__} is not supported: this worker "
                "writes jobs in the format of RQ's own class; run functions that need another class in RQ's own worker"
            )
        if self.queue_class.redis_queue_namespace_prefix != Queue.redis_queue_namespace_prefix:
            raise StartupError(
                f"--queue-class {self.queue_class.__module__}.{self.queue_class.__qualname__} does not name its keys "
                "as RQ's own class does: leave it out, and set RQ_KEY_PREFIX for workers and producers alike"
            )
        redis_version = self.get_redis_server_version()
        if tuple(redis_version) < MIN_REDIS_VERSION:
            version_text = ".".join(map(str, redis_version))
            raise StartupError(f"Redis {version_text} is too old: 6.2 or later is needed")
        settings = WorkerSettings.load()
        self._take_name()
        return settings

    def _take_name(self) -> None:
        """Take this worker's name, even if Redis still lists a killed worker of this machine under this name.

        RQ would reserve the name for the killed worker for eight minutes. The killed worker's leases are ended here, so
        that other workers take up its jobs at once. Raises StartupError if a living worker has the name.
        """
        namesake = living_namesake(self.connection, self.name, socket.gethostname())
        if namesake:
            raise StartupError(
                f"the name {self.name} belongs to another worker, {namesake}: give each worker its own --name; "
                "the name of a dead worker on another machine is free after --worker-ttl and a minute"
            )
        if self.connection.exists(self.key):
            num_jobs = end_leases_of(self.connection, self.name, self.queue_names())
            self.register_death()
            if num_jobs:
                self.log.info(
                    "Worker %s: the last worker of this name died with %d jobs, whose leases are ended",
                    self.name,
                    num_jobs,
                )

    def _serve(
        self,
        engine: Engine,
        settings: WorkerSettings,
        burst: bool,
        max_jobs: int | None,
        max_idle_s: int | None,
    ) -> bool:
        """Run the engine's loop and the I/O thread until the worker leaves. Returns whether any job has ended here."""
        from worker.assembly import assemble

        if settings.traces != "off":
            from worker.traces.otel import OtelTraces

            traces_all = settings.traces == "all"
            self._traces = OtelTraces(
                self.name, settings.model_name, version("tokenmill"), traces_all=traces_all
            )
        limits = Limits(
            burst=burst,
            max_jobs=max_jobs,
            max_idle_s=max_idle_s,
            lease_s=settings.lease_s or self.job_monitoring_interval + LEASE_MARGIN_S,
            max_worker_deaths=settings.max_worker_deaths,
            max_stuck_threads=settings.max_stuck_threads,
            drain_s=settings.drain_s,
            journal_s=settings.journal_s,
        )
        loop, io = assemble(self, engine, settings, limits, self._metrics, self._traces)
        self._io = io
        self._exit_if_stopped()
        io.start()
        loop.run()
        io.join()
        if io.failure is not None:
            raise io.failure
        if self._is_cold:
            raise SystemExit
        return io.jobs_ended > 0

    # Signals and commands

    def _install_signal_handlers(self) -> None:
        """Have SIGINT and SIGTERM call `request_stop`."""
        signal.signal(signal.SIGINT, self.request_stop)
        signal.signal(signal.SIGTERM, self.request_stop)

    def request_stop(self, signum: int, frame: FrameType | None) -> None:
        """Start a warm shutdown, or at a second signal a cold one. While the model loads, exit at once."""
        if self._io is None:
            # The flag is needed too, because the code that this signal interrupts may swallow SystemExit.
            self._is_stopped_early = True
            raise SystemExit
        if self._shutdown_requested_date is None:
            self._stop_requested = self.get_state() == WorkerStatus.BUSY  # as RQ's own workers do
            self._shutdown_requested_date = now()
            self._io.shut_down()
            return
        # Signals within 1 s count as one, because a pool and the terminal may both send a signal for the same request.
        if now() - self._shutdown_requested_date >= timedelta(seconds=1):
            self._is_cold = True
            self._io.shut_down(cold=True)

    def _exit_if_stopped(self) -> None:
        """Raise SystemExit if a signal came while the model loaded.

        The signal's handler has raised SystemExit already, but an import may have swallowed it.
        """
        if self._is_stopped_early:
            raise SystemExit

    def handle_payload(self, message: dict[str, Any]) -> None:
        """Carry out a command from `rq.command`. The subscriber's thread calls this."""
        try:
            payload = json.loads(message["data"])
            command = payload.get("command")
        except (ValueError, AttributeError):
            self.log.warning("Worker %s: a message that is not a command was ignored", self.name)
            return
        if command == "stop-job" and self._io is not None:
            self._io.stop_job(str(payload.get("job_id")))
        elif command == "stop-execution" and self._io is not None:  # sent by RQ 3
            self._io.stop_job(str(payload.get("job_id")), str(payload.get("execution_id")))
        elif command == "shutdown":
            self.log.info("Worker %s: received shutdown command", self.name)
            os.kill(os.getpid(), signal.SIGINT)  # as RQ does
        else:
            self.log.info("Worker %s: command %r ignored", self.name, command)

    def unsubscribe(self) -> None:
        """End the thread that listens for commands.

        RQ's own method unsubscribes before it stops the thread, which then goes on listening for a minute.
        """
        thread: Any = self.pubsub_thread  # RQ annotates this attribute as None
        if thread is not None and self.pubsub is not None:
            thread.stop()
            self.pubsub.unsubscribe()  # the answer wakes the thread up
            thread.join(_UNSUBSCRIBE_S)
            self.pubsub.close()

    def _pubsub_exception_handler(self, exc: Exception, pubsub: Any, pubsub_thread: Any) -> None:
        """Go on listening after any error. RQ goes on only after a lost connection."""
        self._listening_trouble.note(
            type(exc).__name__,
            "Worker %s: cannot listen for commands (%s); trying again",
            self.name,
            shown_error(exc),
        )
        time.sleep(_LISTEN_AGAIN_S)

    # What RQ shows of the worker

    def beat(self, client: Redis, state: str, job_id: str | None) -> None:
        """Write the Redis hash in which RQ keeps this worker: heartbeat, state, and one of the running jobs.

        Raises NameTaken if the hash belongs to another worker that was started later under this name.
        """
        assert self.birth_date is not None  # RQ set the date when the worker signed on
        new_owner = successor(client, self.name, self.birth_date)
        if new_owner:
            self._has_lost_name = True
            raise NameTaken(self.name, new_owner)

        self.last_heartbeat = now()
        self._state = state
        fields = {
            **self.serialize(),
            "last_heartbeat": utcformat(self.last_heartbeat),
            "state": state,
        }
        if self._shutdown_requested_date is not None:
            fields["shutdown_requested_date"] = utcformat(self._shutdown_requested_date)
        with client.pipeline(transaction=False) as pipe:
            pipe.hset(self.key, mapping=fields)
            if job_id is None:
                pipe.hdel(self.key, "current_job")
            else:
                pipe.hset(self.key, "current_job", job_id)
            ttl_s = self.worker_ttl + 60  # as RQ sets it
            pipe.expire(self.key, ttl_s)
            pipe.expire(self.executions_key, ttl_s)
            # RQ's lists of workers are written each time, because other workers remove silent workers from them.
            worker_registration.register(self, pipe)
            pipe.execute()

    def _start_scheduler(
        self,
        burst: bool = False,
        logging_level: str | None = "INFO",
        date_format: str = DEFAULT_LOGGING_DATE_FORMAT,
        log_format: str = DEFAULT_LOGGING_FORMAT,
    ) -> None:
        """Make the scheduler, which `Maintenance` runs. In burst mode, enqueue the due jobs once, here."""
        level = logging_level or self.log.level
        scheduler = Scheduler(self.queues, self.connection, level, (date_format, log_format))
        self.scheduler = scheduler
        if burst:
            scheduler.enqueue_once()
