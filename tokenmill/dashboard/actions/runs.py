"""Cancels runs."""

from jobs.errors import RunResubmitted, UnknownRun
from jobs.runs.control import cancel_run
from jobs.runs.plans.names import is_run_id
from tokenmill.dashboard.actions.forms import Form
from tokenmill.dashboard.actions.runner import ActionContext, ActionResult

_UNKNOWN = "Nothing was cancelled: Redis does not know this run. It may have expired."


def cancel(context: ActionContext, form: Form) -> ActionResult:
    """Cancel a run, as `tokenmill cancel` does."""
    run = form.get("run")
    if not is_run_id(run):
        return ActionResult("cancel run", run, _UNKNOWN)
    try:
        cancelled = cancel_run(context.connection, run)
    except UnknownRun:
        return ActionResult("cancel run", run, _UNKNOWN)
    except RunResubmitted:
        return ActionResult(
            "cancel run", run, "The run was submitted again meanwhile, and goes on."
        )
    noun = "job" if cancelled.removed == 1 else "jobs"
    outcome = (
        f"The run was cancelled: {cancelled.removed:,} {noun} taken from the queue, "
        f"{cancelled.stopped:,} told to stop. Submitting it again resumes it."
    )
    return ActionResult("cancel run", run, outcome)
