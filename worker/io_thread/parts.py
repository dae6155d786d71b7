"""The parts that the duties of the I/O thread share."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

from worker.engine_thread.orders import Order
from worker.io_thread.held.admission import Admission
from worker.io_thread.held.packing import Packer, PayloadBudget
from worker.io_thread.limits import Limits, PollRates
from worker.job_environment import JobEnvironment
from worker.metrics.tally import Tally
from worker.store.client import Clients
from worker.store.job_store import JobStore
from worker.store.redis_clock import RedisClock
from worker.store.user_code import Callbacks
from worker.threads.functions import FunctionPool


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The parts that the classes of the I/O thread share. `assembly.py` makes them.

    store: used by the I/O thread. ends_store: used by the threads of `enders`.
    functions: the threads for users' functions and planning.
    enders: the threads for callbacks and dependents, which must not wait for functions.
    orders: read by the engine's thread. events: calls and reports, read by the I/O thread.
    """

    queue_names: Sequence[str]
    limits: Limits
    clients: Clients
    store: JobStore
    ends_store: JobStore
    environment: JobEnvironment
    admission: Admission
    callbacks: Callbacks
    packer: Packer
    budget: PayloadBudget
    poll_rates: PollRates
    functions: FunctionPool
    enders: FunctionPool
    orders: SimpleQueue[Order]
    events: SimpleQueue[Any]
    tally: Tally
    log: logging.Logger
    clock: Callable[[], float] = time.monotonic
    redis_clock: RedisClock = field(default_factory=RedisClock)
