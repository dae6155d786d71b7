"""Builds the parts of a worker. Only this module knows all of them."""

from __future__ import annotations

import logging
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol

from redis import Redis

from jobs.common.keys import FORMAT
from jobs.context.adapters import Adapters, name_of
from jobs.context.served_model import ServedModel, joined_formats
from jobs.table import ALLOWED_FUNCTIONS
from worker.engine_thread.engine_loop import EngineLoop
from worker.io_thread.held.admission import Admission
from worker.io_thread.held.packing import Packer, PayloadBudget
from worker.io_thread.io_loop import IoLoop
from worker.io_thread.limits import Limits, PollRates
from worker.io_thread.maintenance import Maintenance
from worker.io_thread.parts import Parts
from worker.io_thread.pool_calls import MAX_OPENING
from worker.job_environment import JobEnvironment, prompt_meter
from worker.metrics.tally import Tally
from worker.settings import WorkerSettings
from worker.store.client import Clients, new_client
from worker.store.job_store import JobStore, Keeping
from worker.store.redis_clock import RedisClock
from worker.store.user_code import Callbacks, Webhooks
from worker.store.worker_record import WorkerRecord, process_facts
from worker.threads.functions import FunctionPool
from worker.threads.interrupts import shield_imports
from worker.traces.job_trace import Traces

if TYPE_CHECKING:
    from engine import Engine
    from worker.metrics.server import MetricsServer

REDIS_TIMEOUT_S = 10.0
"""Seconds that a call to Redis may take."""

WEBHOOK_THREADS = 8
"""Webhooks that are sent at the same time."""


class RqWorker(Protocol):
    """What the assembly needs of `BatchWorker`. Most members are inherited from RQ's worker and keep RQ's names."""

    name: str
    log: logging.Logger
    disable_default_exception_handler: bool
    default_result_ttl: int
    maintenance_interval: int
    scheduler: Any
    _exc_handlers: list[Any]

    @property
    def connection(self) -> Redis:
        """The connection that RQ's command has made."""

    def queue_names(self) -> list[str]:
        """Return the names of the queues in the order of the command line."""

    def beat(self, client: Redis, state: str, job_id: str | None) -> None:
        """Write the Redis hash in which RQ keeps this worker. job_id: one of the running jobs; None if no job runs."""


def assemble(
    worker: RqWorker,
    engine: Engine,
    settings: WorkerSettings,
    limits: Limits,
    metrics: MetricsServer | None = None,
    traces: Traces | None = None,
) -> tuple[EngineLoop, IoLoop]:
    """Build the engine's loop, which the calling thread must run, and the I/O thread, which is not started yet.

    metrics: the server that shows the worker's numbers, if any. traces: sends the traces of the worker's jobs, if any.
    """
    shield_imports()
    served = settings.served_model(engine.identity, engine.attention_backend, engine.max_model_len)
    meter = prompt_meter(engine, settings.block_size)
    tally = Tally()
    clients = _clients(worker.connection, tally)
    shared_context = settings.job_context(clients.pool, served, meter=lambda: meter)
    environment = JobEnvironment(shared_context, settings.function_grace_s, traces)
    parts = _parts(
        worker, settings, limits, served, clients, environment, tally, slots=engine.max_num_seqs
    )

    facts = _facts(worker.name, served, settings.model)
    record = WorkerRecord(
        clients.io,
        worker.name,
        parts.queue_names,
        worker.beat,
        facts,
        parts.redis_clock,
        changing_facts=partial(_changing_facts, served, shared_context.adapters),
    )
    scheduler = None if limits.burst else worker.scheduler  # in burst mode it has run already
    maintenance = Maintenance(parts, scheduler, worker.maintenance_interval)
    io = IoLoop(parts, record, maintenance)
    loop = EngineLoop(engine, parts.orders, io.post)
    if metrics is not None:
        metrics.serve(facts, parts.queue_names, tally, loop, io)
    return loop, io


def _parts(
    worker: RqWorker,
    settings: WorkerSettings,
    limits: Limits,
    served: ServedModel,
    clients: Clients,
    environment: JobEnvironment,
    tally: Tally,
    *,
    slots: int,
) -> Parts:
    """Build the parts that the duties of the I/O thread share. slots: the most sequences that the engine runs."""
    queue_names = worker.queue_names()
    log = worker.log
    redis_clock = RedisClock()
    adapters = environment.shared_context.adapters
    store = JobStore(
        clients.io,
        worker.name,
        limits.lease_s,
        max_job_bytes=settings.max_job_bytes,
        models=served.names,
        keeping=Keeping(
            records_failures=not worker.disable_default_exception_handler,
            result_ttl_s=worker.default_result_ttl,
        ),
        clock=redis_clock,
        more_models=lambda: adapters.names,
    )
    ends_store = JobStore(
        clients.pool,
        worker.name,
        limits.lease_s,
        max_job_bytes=settings.max_job_bytes,
        clock=redis_clock,
    )
    webhook_pool = FunctionPool(WEBHOOK_THREADS, "tokenmill-webhooks")
    webhooks = Webhooks(webhook_pool, settings.allowed_webhook_hosts, log)
    packer = Packer(
        len(queue_names),
        slots=slots,
        prefetch=settings.prefetch,
        max_functions=settings.function_threads,
        max_files=MAX_OPENING,
    )
    return Parts(
        queue_names=queue_names,
        limits=limits,
        clients=clients,
        store=store,
        ends_store=ends_store,
        environment=environment,
        admission=Admission(ALLOWED_FUNCTIONS | set(settings.allowed_functions)),
        callbacks=Callbacks(worker._exc_handlers, clients.pool, clients.user, webhooks),
        packer=packer,
        budget=PayloadBudget(len(queue_names), settings.max_held_bytes),
        poll_rates=PollRates(queue_names, limits),
        functions=FunctionPool(settings.function_threads, "tokenmill-functions"),
        enders=FunctionPool(settings.function_threads, "tokenmill-ends"),
        orders=SimpleQueue(),
        events=SimpleQueue(),
        tally=tally,
        log=log,
        redis_clock=redis_clock,
    )


def _clients(connection: Redis, tally: Tally) -> Clients:
    """Return a worker's clients of Redis: for the I/O thread, for our functions, and for users' code.

    Only the client for users' code resends every command after a lost connection, as RQ's own clients do. Our own code
    decides for each command whether to send it again.
    """
    count_own_command = partial(tally.count_sent, "worker")
    count_user_command = partial(tally.count_sent, "functions")
    return Clients(
        io=new_client(
            connection, REDIS_TIMEOUT_S, on_sent=count_own_command, on_reply=tally.count_reply
        ),
        pool=new_client(connection, REDIS_TIMEOUT_S, on_sent=count_own_command),
        user=new_client(connection, REDIS_TIMEOUT_S, resend=True, on_sent=count_user_command),
    )


def _changing_facts(served: ServedModel, adapters: Adapters) -> dict[str, Any]:
    """Return the facts in the worker's Redis key that change with its adapters; empty if no adapter can come or go."""
    if not adapters.is_live:
        return {}
    return {
        "models": [*served.names, *adapters.names],
        "adapters": sorted(map(name_of, adapters.pinned)),
    }


def _facts(worker_name: str, served: ServedModel, source: str) -> dict[str, Any]:
    """Return the constant fields of the worker's Redis key. Jobs may call the model by any name in `models`."""
    return {
        "worker": worker_name,
        "model": served.name,
        "model_source": source,
        "models": served.names,
        "fingerprint": served.fingerprint,
        "max_model_len": served.max_model_len,
        "clock_formats": joined_formats(served.clock_formats),
        "dtype": served.dtype,
        "attention_backend": served.attention_backend,
        **process_facts(),
        "format": FORMAT,
    }
