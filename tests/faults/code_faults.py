"""What users' own code does to its jobs: saves them over what the worker wrote, and freezes."""

from __future__ import annotations

import signal
import time

from tests.faults.harness import Harness

SAVING_STEPS = ["claim", "begin", "renew", "finish", "callback", "dependents queued", "close", "release"]


def saving_code(faults: Harness, count: int) -> None:
    """Functions and callbacks call `job.save()`, and producers save the copies that they have kept, while
    workers are killed."""
    copies = []
    for _ in range(count):
        copies += faults.ledger.ask_saving_jobs(12)
        name = faults.start(faults.random_strike("kill", SAVING_STEPS))
        until = time.monotonic() + faults.rng.uniform(0.3, 1.0)
        while faults.is_alive(name) and time.monotonic() < until:
            faults.rng.choice(copies).save()
            time.sleep(0.005)
        faults.count("SIGKILL among code that saves")
        faults.end(name)
    other = faults.start()
    for copy in copies:
        copy.save()
    faults.end_cleanly(other, (0, -signal.SIGTERM))
    faults.settle("saving code")


def frozen_functions(faults: Harness, count: int) -> None:
    """Functions hang in a C call beyond their timeout; one worker in two is killed while they do."""
    for turn in range(count):
        faults.ledger.ask_frozen_functions(3)
        faults.top_up()
        name = faults.start()
        faults.a_moment(2.5)
        faults.count("function hangs in C", 3)
        if turn % 2:
            faults.count("SIGKILL beside hanging functions")
            faults.end(name)
        else:
            faults.end_cleanly(name, (0, -signal.SIGTERM))
    faults.settle("frozen functions")
