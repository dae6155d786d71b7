"""A worker without its threads, turn by turn."""

import logging
from queue import Empty, SimpleQueue
from typing import Any, cast
from uuid import uuid4

from redis import Redis

from engine import SamplingParams
from jobs.context import JobContext
from jobs.context.served_model import ServedModel
from tests.worker.fake_engine import FakeEngine
from worker.engine_thread.engine_loop import EngineLoop
from worker.engine_thread.orders import Stepped
from worker.io_thread.held.admission import Admission
from worker.io_thread.held.packing import Packer, PayloadBudget
from worker.io_thread.job_runner import JobRunner
from worker.io_thread.limits import Limits, PollRates
from worker.io_thread.parts import Parts
from worker.job_environment import JobEnvironment
from worker.metrics.tally import Tally
from worker.store.client import Clients
from worker.store.job_store import JobStore
from worker.store.records.claimed_job import ClaimRequest
from worker.store.user_code import Callbacks, Webhooks
from worker.threads.functions import FunctionPool

LIMITS = Limits(
    burst=False,
    max_jobs=None,
    max_idle_s=None,
    lease_s=60,
    max_worker_deaths=5,
    max_stuck_threads=16,
    drain_s=None,
)
F = "tests.worker.functions."
ALLOWED = {"jobs.complete", F + "add", F + "own_state", F + "on_success_state"}


class ByHand:
    """The parts of a worker, driven turn by turn in one thread; its clock stands still unless moved."""

    def __init__(self, redis: Redis, slots: int) -> None:
        self.moment = 1000.0
        self.redis, self.store = redis, JobStore(redis, "w", lease_s=600)
        self.orders: SimpleQueue[Any] = SimpleQueue()
        self.events: SimpleQueue[Any] = SimpleQueue()
        self.packer = Packer(1, slots, prefetch=32, max_functions=2, max_files=2)
        self.engine = EngineLoop(
            cast(Any, FakeEngine(slots, 0.0)), self.orders, self.events.put, lambda: self.moment
        )
        self.pools = [FunctionPool(1, name) for name in ("functions", "ends", "webhooks")]
        functions, enders, webhooks = self.pools
        log = logging.getLogger("by hand")
        model = ServedModel("m", "f", "d")
        lent = JobContext(redis, "", "", "", (), model, SamplingParams.from_mapping)
        self.parts = Parts(
            queue_names=["bulk"],
            limits=LIMITS,
            clients=Clients(redis, redis, redis),
            store=self.store,
            ends_store=self.store,
            environment=JobEnvironment(lent),
            admission=Admission(ALLOWED),
            callbacks=Callbacks([], redis, redis, Webhooks(webhooks, (), log)),
            packer=self.packer,
            budget=PayloadBudget(1, 1 << 26),
            poll_rates=PollRates(["bulk"], LIMITS, jitter=lambda: 1.0),
            functions=functions,
            enders=enders,
            orders=self.orders,
            events=self.events,
            tally=Tally(),
            log=log,
            clock=lambda: self.moment,
        )
        self.runner = JobRunner(self.parts)

    def claim(self) -> None:
        wanted = ClaimRequest("bulk", 100, uuid4().hex[:24], takes_suspects=True, max_functions=2)
        for claimed in self.store.claim([wanted], float("inf"))[0].jobs:
            self.runner.add(claimed, 0)
        self.runner.open_claimed()
        self.runner.show_begun(self.store)

    def turn(self) -> None:
        """Send the engine what it has room for, step it, and write what came of it."""
        self.runner.feed()
        if not self.orders.empty() or self.engine._engine.has_unfinished:
            self.engine.turn()
        self.take_events()

    def take_events(self, wait_s: float = 0.0) -> None:
        try:
            event = self.events.get(timeout=wait_s) if wait_s else self.events.get_nowait()
            while True:
                if isinstance(event, Stepped):
                    self.runner.streams.note_started(event.started, event.at)
                    self.runner.streams.deliver(event.completions, event.at)
                else:
                    event()
                event = self.events.get_nowait()
        except Empty:
            pass
        self.runner.feed()
        self.runner.flush(self.store)
        self.runner.show_begun(self.store)

    def run_out(self) -> None:
        while self.runner.num_held:
            self.turn()
            self.take_events(0.01)

    def close(self) -> None:
        self.runner.threads.close(10)
