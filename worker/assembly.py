"""Puts the parts of one worker together; the only place that knows all of them."""

from __future__ import annotations

from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from jobs.common.version import code_version
from jobs.context.answer_memo import AnswerMemo
from jobs.context.served_model import ServedModel
from jobs.context.shard_bytes import ShardBytes
from jobs.stock_worker import check_sampling
from jobs.table import ALLOWED_FUNCTIONS
from worker.admission import Admission
from worker.claimer import Claimer
from worker.engine_like import EngineLike
from worker.engine_loop import EngineLoop
from worker.functions import FunctionPool
from worker.interrupts import shield_imports
from worker.io_loop import IoLoop
from worker.job_environment import JobEnvironment
from worker.job_runner import JobRunner
from worker.limits import Limits
from worker.orders import Order
from worker.packing import Packer
from worker.payload_budget import PayloadBudget
from worker.releaser import Releaser
from worker.reporter import Reporter
from worker.store.client import own_client
from worker.store.job_store import JobStore
from worker.store.registries import Registries
from worker.store.stock_jobs import StockJobs
from worker.store.user_code import Callbacks
from worker.store.worker_record import WorkerRecord
from worker.task_files import MAX_OPENING
from worker.upkeep import Upkeep

if TYPE_CHECKING:
    from worker.batch_worker import BatchWorker
    from worker.settings import WorkerSettings

REDIS_TIMEOUT_S = 10.0
LEASE_MARGIN_S = 45
"""Added to --job-monitoring-interval: with the sweep's period it stays within the promised 60 s."""


def assemble(
    worker: BatchWorker,
    engine: EngineLike,
    settings: WorkerSettings,
    burst: bool,
    max_jobs: int | None,
    max_idle_s: float | None,
) -> tuple[EngineLoop, IoLoop]:
    """Build the engine's loop, for the calling thread, and the I/O thread, not yet started."""
    shield_imports()
    served = settings.served_model(engine.identity, engine.attention_backend)
    lease_s = settings.lease_s or worker.job_monitoring_interval + LEASE_MARGIN_S
    orders: SimpleQueue[Order] = SimpleQueue()
    events: SimpleQueue[Any] = SimpleQueue()
    io_client = own_client(worker.connection, REDIS_TIMEOUT_S)
    pool_client = own_client(worker.connection, REDIS_TIMEOUT_S)
    user_client = own_client(worker.connection, REDIS_TIMEOUT_S, resend=True)
    budget = PayloadBudget(len(worker.queues), settings.max_held_bytes)
    packer = Packer(
        len(worker.queues),
        settings.max_num_seqs,
        settings.prefetch,
        settings.function_threads,
        MAX_OPENING,
    )
    enders = FunctionPool(settings.function_threads, "tokenmill-ends")
    ends_store = JobStore(pool_client, worker.name, lease_s, max_job_bytes=settings.max_job_bytes)
    runner = JobRunner(
        packer=packer,
        budget=budget,
        admission=Admission(
            ALLOWED_FUNCTIONS | set(settings.allowed_functions), settings.allowed_webhook_hosts
        ),
        environment=JobEnvironment(
            settings.data_roots,
            served,
            check_sampling,
            settings.function_grace_s,
            settings.file_timeout_s,
            answers=AnswerMemo(settings.answer_memo_bytes),
            max_result_bytes=settings.max_result_bytes,
            shard_bytes=ShardBytes(settings.max_shard_bytes),
        ),
        orders=orders,
        functions=FunctionPool(settings.function_threads, "tokenmill-functions"),
        enders=enders,
        pool_client=pool_client,
        user_client=user_client,
        callbacks=Callbacks(worker, pool_client, user_client),
        ends_store=ends_store,
        post=events.put,
        log=worker.log,
    )
    store = JobStore(
        io_client,
        worker.name,
        lease_s,
        not worker.disable_default_exception_handler,
        settings.max_job_bytes,
        served.names,
        default_result_ttl_s=worker.default_result_ttl,
    )
    registries = Registries(io_client, worker.name)
    limits = Limits(
        burst,
        max_jobs,
        max_idle_s,
        lease_s,
        settings.max_worker_deaths,
        settings.max_stuck_threads,
        settings.drain_s,
    )
    releaser = Releaser(store, runner, limits.max_worker_deaths, worker.log)
    record = WorkerRecord(io_client, worker.name, worker.beat, _facts(worker.name, served))
    io = IoLoop(
        queue_names=worker.queue_names(),
        store=store,
        runner=runner,
        claimer=Claimer(
            queue_names=worker.queue_names(),
            store=store,
            registries=registries,
            runner=runner,
            packer=packer,
            budget=budget,
            releaser=releaser,
            limits=limits,
            log=worker.log,
        ),
        releaser=releaser,
        reporter=Reporter(record, runner, worker.log),
        budget=budget,
        orders=orders,
        limits=limits,
        upkeep=Upkeep(
            Registries(pool_client, worker.name),
            worker.queue_names(),
            enders,
            worker.keep_scheduler,
            worker.maintenance_interval,
            worker.log,
        ),
        stock=StockJobs(io_client, store),
        log=worker.log,
        events=events,
    )
    return EngineLoop(engine, orders, io.post), io


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
