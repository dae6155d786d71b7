"""Puts the parts of one worker together; the only place that knows all of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol

from redis import Redis

from jobs.common.version import code_version
from jobs.context import JobContext
from jobs.context.answers import AnswerMemo
from jobs.context.check_processes import Checks
from jobs.context.served_model import PromptMeter, ServedModel
from jobs.context.shared_files import ShardBytes
from jobs.installed import check_sampling
from jobs.table import ALLOWED_FUNCTIONS
from worker.engine_thread.engine_like import EngineLike
from worker.engine_thread.engine_loop import EngineLoop
from worker.engine_thread.orders import Order
from worker.io_thread.claimer import Claimer
from worker.io_thread.held.admission import Admission
from worker.io_thread.held.packing import Packer, PayloadBudget
from worker.io_thread.io_loop import IoLoop
from worker.io_thread.job_runner import JobRunner
from worker.io_thread.limits import Limits, PollRates
from worker.io_thread.maintenance import Maintenance
from worker.io_thread.pool_calls import MAX_OPENING
from worker.io_thread.releaser import Releaser
from worker.io_thread.reporter import Reporter
from worker.job_environment import JobEnvironment, prompt_meter
from worker.metrics.tally import Counts, Tally
from worker.metrics.watched_worker import WatchedWorker
from worker.settings import WorkerSettings
from worker.store.client import Clients, own_client
from worker.store.job_store import JobStore, Keeping
from worker.store.registries import Registries
from worker.store.stock_jobs import StockJobs
from worker.store.user_code import Callbacks, Webhooks
from worker.store.worker_record import WorkerRecord
from worker.threads.functions import FunctionPool
from worker.threads.interrupts import check_interrupted, shield_imports
from worker.traces.job_trace import Traces

if TYPE_CHECKING:
    from worker.metrics.server import MetricsServer

REDIS_TIMEOUT_S = 10.0
WEBHOOK_THREADS = 8


class RqWorker(Protocol):
    """What the parts need of `BatchWorker`, most of it from RQ's own worker, in its words."""

    name: str
    log: logging.Logger
    disable_default_exception_handler: bool
    default_result_ttl: int
    maintenance_interval: int
    scheduler: Any

    @property
    def connection(self) -> Redis: ...
    @property
    def exception_handlers(self) -> Sequence[Callable[..., Any]]: ...
    def queue_names(self) -> list[str]: ...
    def beat(self, client: Redis, state: str, job_id: str | None) -> None: ...


def assemble(
    worker: RqWorker,
    engine: EngineLike,
    settings: WorkerSettings,
    limits: Limits,
    metrics: MetricsServer | None = None,
    traces: Traces | None = None,
) -> tuple[EngineLoop, IoLoop]:
    """Build the engine's loop, for the calling thread, and the I/O thread, not yet started.

    metrics: where the worker is told of, if anywhere. traces: who traces its jobs, if anybody.
    """
    shield_imports()
    served = settings.served_model(engine.identity, engine.attention_backend)
    orders: SimpleQueue[Order] = SimpleQueue()
    meter = prompt_meter(engine, settings.max_num_seqs, settings.block_size)
    counts = None if metrics is None else Counts()
    assembly = _Assembly(worker, settings, served, limits, meter, counts or Tally(), traces or Traces())
    io = assembly.io_loop(orders)
    loop = EngineLoop(engine, orders, io.post)
    if metrics is not None and counts is not None:
        metrics.serve(assembly.watched(counts), loop, io)
    return loop, io


class _Assembly:
    """The parts of one worker that others share."""

    def __init__(
        self,
        worker: RqWorker,
        settings: WorkerSettings,
        served: ServedModel,
        limits: Limits,
        meter: PromptMeter,
        tally: Tally,
        traces: Traces,
    ) -> None:
        self._meter, self._tally, self._traces = meter, tally, traces
        self._worker, self._settings, self._served, self._limits = worker, settings, served, limits
        self._queue_names = worker.queue_names()
        connection, sent = worker.connection, tally.sent
        self._clients = Clients(
            io=own_client(connection, REDIS_TIMEOUT_S, sent=sent),
            pool=own_client(connection, REDIS_TIMEOUT_S, sent=sent),
            user=own_client(connection, REDIS_TIMEOUT_S, resend=True, sent=tally.sent_by_functions),
        )
        self._facts = _facts(worker.name, served)
        self._events: SimpleQueue[Any] = SimpleQueue()
        self._enders = FunctionPool(settings.function_threads, "tokenmill-ends")
        self._poll_rates = PollRates(self._queue_names, limits)
        self._budget = PayloadBudget(len(self._queue_names), settings.max_held_bytes)
        self._packer = Packer(
            len(self._queue_names),
            settings.max_num_seqs,
            settings.prefetch,
            settings.function_threads,
            MAX_OPENING,
        )

    def io_loop(self, orders: SimpleQueue[Order]) -> IoLoop:
        """The I/O thread, not yet started."""
        worker, store, runner = self._worker, self._store(), self._runner(orders)
        releaser = Releaser(store, runner, self._limits.max_worker_deaths, worker.log)
        record = WorkerRecord(self._clients.io, worker.name, self._queue_names, worker.beat, self._facts)
        self._reporter = Reporter(record, self._poll_rates, runner, self._settings.max_num_seqs, worker.log)
        return IoLoop(
            queue_names=self._queue_names,
            store=store,
            runner=runner,
            claimer=Claimer(
                queue_names=self._queue_names,
                store=store,
                registries=Registries(self._clients.io),
                poll_rates=self._poll_rates,
                runner=runner,
                packer=self._packer,
                budget=self._budget,
                releaser=releaser,
                limits=self._limits,
                log=worker.log,
            ),
            poll_rates=self._poll_rates,
            releaser=releaser,
            reporter=self._reporter,
            budget=self._budget,
            orders=orders,
            limits=self._limits,
            maintenance=self._maintenance(),
            stock=StockJobs(self._clients.io, store),
            log=worker.log,
            events=self._events,
        )

    def watched(self, counts: Counts) -> WatchedWorker:
        """What metrics tell of it; `io_loop` was called before."""
        reporter = self._reporter
        return WatchedWorker(
            facts=self._facts,
            queue_names=tuple(self._queue_names),
            counts=counts,
            shown=lambda: reporter.shown,
            engine_stats=lambda: reporter.engine_stats,
        )

    def _store(self) -> JobStore:
        return JobStore(
            self._clients.io,
            self._worker.name,
            self._limits.lease_s,
            self._settings.max_job_bytes,
            self._served.names,
            Keeping(not self._worker.disable_default_exception_handler, self._worker.default_result_ttl),
        )

    def _runner(self, orders: SimpleQueue[Order]) -> JobRunner:
        worker, settings = self._worker, self._settings
        allowed = ALLOWED_FUNCTIONS | set(settings.allowed_functions)
        webhooks = Webhooks(
            FunctionPool(WEBHOOK_THREADS, "tokenmill-webhooks"), settings.allowed_webhook_hosts, worker.log
        )
        return JobRunner(
            packer=self._packer,
            budget=self._budget,
            admission=Admission(allowed),
            environment=self._environment(),
            orders=orders,
            functions=FunctionPool(settings.function_threads, "tokenmill-functions"),
            enders=self._enders,
            clients=self._clients,
            callbacks=Callbacks(worker.exception_handlers, self._clients.pool, self._clients.user, webhooks),
            ends_store=JobStore(
                self._clients.pool, worker.name, self._limits.lease_s, max_job_bytes=settings.max_job_bytes
            ),
            post=self._events.put,
            tally=self._tally,
            log=worker.log,
        )

    def _environment(self) -> JobEnvironment:
        settings = self._settings
        lent = JobContext(
            self._clients.pool,
            *("", "", ""),
            settings.data_roots,
            self._served,
            check_sampling,
            answers=AnswerMemo(settings.answer_memo_bytes),
            shard_bytes=ShardBytes(settings.max_shard_bytes),
            check_interrupted=check_interrupted,
            max_result_bytes=settings.max_result_bytes,
            file_timeout_s=settings.file_timeout_s,
            meter=lambda: self._meter,
            checks=Checks(settings.allowed_functions, settings.check_timeout_s),
            webhook_hosts=frozenset(settings.allowed_webhook_hosts),
            allowed_functions=frozenset(settings.allowed_functions),
        )
        return JobEnvironment(lent, settings.function_grace_s, self._traces)

    def _maintenance(self) -> Maintenance:
        return Maintenance(
            Registries(self._clients.pool),
            self._queue_names,
            self._enders,
            self._worker.scheduler,
            self._worker.maintenance_interval,
            self._worker.log,
        )


def _facts(worker_name: str, served: ServedModel) -> dict[str, Any]:
    """What the worker's key says from start to end. models: all by which jobs may ask for its model."""
    return {
        "worker": worker_name,
        "model": served.name,
        "models": served.names,
        "dtype": served.dtype,
        "attention_backend": served.attention_backend,
        "version": code_version(),
    }
