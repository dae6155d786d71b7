"""Suspends and resumes all workers, and drains or stops one."""

import json
import time

from jobs.common.display import safe_name
from jobs.common.rq_jobs import SUSPENDED_KEY, command_channel
from tokenmill.dashboard.actions.forms import Form
from tokenmill.dashboard.actions.runner import ActionContext, ActionResult

#: RQ's command that ends a worker. If it comes again after at least a second, the worker gives back what still runs.
SHUTDOWN = json.dumps({"command": "shutdown"})
#: The seconds between the two commands.
SECOND_AFTER_S = 1.2


def suspend(context: ActionContext, form: Form) -> ActionResult:
    """Make all workers stop claiming jobs, as `rq suspend` does."""
    context.connection.set(SUSPENDED_KEY, 1)
    outcome = "No worker claims anything until they are resumed. What they hold goes on."
    return ActionResult("suspend", "all workers", outcome)


def resume(context: ActionContext, form: Form) -> ActionResult:
    """Let all workers claim jobs again, as `rq resume` does."""
    if context.connection.delete(SUSPENDED_KEY):
        outcome = "The workers claim again."
    else:
        outcome = "The workers were not suspended."
    return ActionResult("resume", "all workers", outcome)


def drain(context: ActionContext, form: Form) -> ActionResult:
    """Make a worker finish its running jobs and then end, as a first SIGTERM does."""
    worker = form.get("worker")
    num_receivers = context.connection.publish(command_channel(worker), SHUTDOWN)
    if num_receivers:
        outcome = f"{safe_name(worker)} finishes what it has begun, gives back the rest, and ends."
    else:
        outcome = _absent_text(worker)
    return ActionResult("drain", worker, outcome)


def stop(context: ActionContext, form: Form) -> ActionResult:
    """Make a worker give all its jobs back to the queue and then end, as a second SIGTERM does.

    The worker needs the command twice: after the first one, it still finishes its running jobs.
    """
    worker = form.get("worker")
    num_receivers = context.connection.publish(command_channel(worker), SHUTDOWN)
    if num_receivers:
        time.sleep(SECOND_AFTER_S)
        context.connection.publish(command_channel(worker), SHUTDOWN)
        outcome = f"{safe_name(worker)} gives back all that it holds, and ends."
    else:
        outcome = _absent_text(worker)
    return ActionResult("stop", worker, outcome)


def _absent_text(worker: str) -> str:
    """Return the outcome of a command that no worker received."""
    return (
        f"Nothing was told: {safe_name(worker)} does not listen. It is dead, or cut off from Redis."
    )
