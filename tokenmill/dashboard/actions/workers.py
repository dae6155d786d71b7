"""Suspends and resumes all workers, and drains or stops one."""

import json
import time

from jobs.common.display import safe_name
from jobs.common.rq_jobs import SUSPENDED_KEY, command_channel
from tokenmill.dashboard.actions.forms import Form
from tokenmill.dashboard.actions.runner import ActionContext, ActionResult

#: RQ's command that ends a worker. A second one, a second or more later, has it give back what still runs.
SHUTDOWN = json.dumps({"command": "shutdown"})
#: Seconds between the two.
SECOND_AFTER_S = 1.2


def suspend(context: ActionContext, form: Form) -> ActionResult:
    """Have all workers claim nothing more, as `rq suspend` does."""
    context.connection.set(SUSPENDED_KEY, 1)
    outcome = "No worker claims anything until they are resumed. What they hold goes on."
    return ActionResult("suspend", "all workers", outcome)


def resume(context: ActionContext, form: Form) -> ActionResult:
    """Let workers claim again, as `rq resume` does."""
    was_there = context.connection.delete(SUSPENDED_KEY)
    outcome = "The workers claim again." if was_there else "The workers were not suspended."
    return ActionResult("resume", "all workers", outcome)


def drain(context: ActionContext, form: Form) -> ActionResult:
    """Have a worker finish what it has begun, and end. It is what a first SIGTERM does."""
    worker = form.get("worker")
    outcome = _absent(worker)
    if context.connection.publish(command_channel(worker), SHUTDOWN):
        outcome = f"{safe_name(worker)} finishes what it has begun, gives back the rest, and ends."
    return ActionResult("drain", worker, outcome)


def stop(context: ActionContext, form: Form) -> ActionResult:
    """Have a worker give back all that it holds, and end. It is what a second SIGTERM does."""
    worker = form.get("worker")
    outcome = _absent(worker)
    if context.connection.publish(command_channel(worker), SHUTDOWN):
        time.sleep(SECOND_AFTER_S)
        context.connection.publish(command_channel(worker), SHUTDOWN)
        outcome = f"{safe_name(worker)} gives back all that it holds, and ends."
    return ActionResult("stop", worker, outcome)


def _absent(worker: str) -> str:
    return (
        f"Nothing was told: {safe_name(worker)} does not listen. It is dead, or cut off from Redis."
    )
