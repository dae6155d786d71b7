"""Suspends and resumes all workers, and drains or stops one."""

import json
import time

from jobs.common.display import safe_name
from jobs.common.rq_jobs import SUSPENDED_KEY, command_channel
from tokenmill.dashboard.actions.deeds import Deed, Hands
from tokenmill.dashboard.actions.forms import Form

#: RQ's command that ends a worker. A second one, a second or more later, has it give back what still runs.
SHUTDOWN = json.dumps({"command": "shutdown"})
#: Seconds between the two.
SECOND_AFTER_S = 1.2


def suspend(hands: Hands, form: Form) -> Deed:
    """Have all workers claim nothing more, as `rq suspend` does."""
    hands.connection.set(SUSPENDED_KEY, 1)
    outcome = "No worker claims anything until they are resumed. What they hold goes on."
    return Deed("suspend", "all workers", outcome)


def resume(hands: Hands, form: Form) -> Deed:
    """Let workers claim again, as `rq resume` does."""
    was_there = hands.connection.delete(SUSPENDED_KEY)
    outcome = "The workers claim again." if was_there else "The workers were not suspended."
    return Deed("resume", "all workers", outcome)


def drain(hands: Hands, form: Form) -> Deed:
    """Have a worker finish what it has begun, and end. It is what a first SIGTERM does."""
    worker = form.get("worker")
    outcome = _absent(worker)
    if hands.connection.publish(command_channel(worker), SHUTDOWN):
        outcome = f"{safe_name(worker)} finishes what it has begun, gives back the rest, and ends."
    return Deed("drain", worker, outcome)


def stop(hands: Hands, form: Form) -> Deed:
    """Have a worker give back all that it holds, and end. It is what a second SIGTERM does."""
    worker = form.get("worker")
    outcome = _absent(worker)
    if hands.connection.publish(command_channel(worker), SHUTDOWN):
        time.sleep(SECOND_AFTER_S)
        hands.connection.publish(command_channel(worker), SHUTDOWN)
        outcome = f"{safe_name(worker)} gives back all that it holds, and ends."
    return Deed("stop", worker, outcome)


def _absent(worker: str) -> str:
    return (
        f"Nothing was told: {safe_name(worker)} does not listen. It is dead, or cut off from Redis."
    )
