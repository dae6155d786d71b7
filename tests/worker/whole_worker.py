"""A whole worker in the process of the test: its I/O loop and its engine take turns, by a clock that jumps."""

import logging
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, cast

from redis import Redis

from engine import SamplingParams
from jobs.context import JobContext
from tests.jobs.answering import MODEL
from tests.worker.by_hand import ALLOWED, F
from tests.worker.fake_engine import FakeEngine
from worker.engine_thread.engine_loop import EngineLoop
from worker.io_thread.held.admission import Admission
from worker.io_thread.held.packing import Packer, PayloadBudget
from worker.io_thread.io_loop import IoLoop
from worker.io_thread.limits import Limits, PollRates
from worker.io_thread.maintenance import Maintenance
from worker.io_thread.parts import Parts
from worker.job_environment import JobEnvironment
from worker.metrics.tally import Tally
from worker.store.client import Clients
from worker.store.job_store import JobStore
from worker.store.user_code import Callbacks, Webhooks
from worker.store.worker_record import WorkerRecord
from worker.threads.functions import FunctionPool

TURN_S = 11.0
"""How far the clock jumps with each turn: every duty is due each time."""

OWN_JOBS = {"jobs.complete", "jobs.score_parquet", "jobs.score_shard"}
MAX_FILES, MAX_FUNCTIONS = 2, 2


class WholeWorker:
    """All parts of a worker but its threads of the I/O loop and of the engine."""

    def __init__(self, redis: Redis, data_root: str, max_deaths: int = 2) -> None:
        self.moment = 1000.0
        self._later: list[tuple[float, Callable[[], None]]] = []
        limits = Limits(
            burst=False,
            max_jobs=None,
            max_idle_s=None,
            lease_s=600,
            max_worker_deaths=max_deaths,
            max_stuck_threads=16,
            drain_s=None,
        )
        orders: SimpleQueue[Any] = SimpleQueue()
        events: SimpleQueue[Any] = SimpleQueue()
        functions, enders, webhooks = (
            FunctionPool(2, name) for name in ("functions", "ends", "webhooks")
        )
        log, store = (
            logging.getLogger("whole worker"),
            JobStore(redis, "w", lease_s=600, models=MODEL.names),
        )
        self.packer = Packer(1, 16, prefetch=32, max_functions=MAX_FUNCTIONS, max_files=MAX_FILES)
        lent = JobContext(redis, "", "", "", (data_root,), MODEL, SamplingParams.from_mapping)
        names = ["bulk"]
        parts = Parts(
            queue_names=names,
            limits=limits,
            clients=Clients(redis, redis, redis),
            store=store,
            ends_store=JobStore(redis, "w", lease_s=600),
            environment=JobEnvironment(lent),
            admission=Admission(ALLOWED | OWN_JOBS | {f"{F}ignore"}),
            callbacks=Callbacks([], redis, redis, Webhooks(webhooks, (), log)),
            packer=self.packer,
            budget=PayloadBudget(1, 1 << 26),
            poll_rates=PollRates(names, limits, jitter=lambda: 1.0),
            functions=functions,
            enders=enders,
            orders=orders,
            events=events,
            tally=Tally(),
            log=log,
            clock=lambda: self.moment,
        )
        record = WorkerRecord(
            redis, "w", names, lambda client, state, job_id: None, {"worker": "w"}
        )
        self.io = IoLoop(parts, record, Maintenance(parts, None, 600.0))
        self.runner, self.tally, self.pools = (
            self.io._runner,
            parts.tally,
            (functions, enders, webhooks),
        )
        self.engine = EngineLoop(
            cast(Any, FakeEngine(16, 0.0)), orders, self.io.post, lambda: self.moment
        )

    def turn(self) -> bool:
        """Let both loops do what is due; False when the worker would go."""
        goes_on = self.io.turn()
        self.moment += TURN_S
        due = [call for moment, call in self._later if moment <= self.moment]
        self._later = [(moment, call) for moment, call in self._later if moment > self.moment]
        for call in due:
            call()
        if not self.engine._orders.empty() or self.engine._engine.has_unfinished:
            self.engine.turn()
        return goes_on

    def after_turns(self, number: int, call: Callable[[], None]) -> None:
        self._later.append((self.moment + number * TURN_S, call))

    def close(self) -> None:
        self.runner.threads.close(10)
        self.engine._intake.close()
