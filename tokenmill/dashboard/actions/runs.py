"""Cancels runs."""

from jobs.errors import RunResubmitted, UnknownRun
from jobs.runs.control import cancel_run
from jobs.runs.plans.names import is_run_id
from tokenmill.dashboard.actions.deeds import Deed, Hands
from tokenmill.dashboard.actions.forms import Form

_UNKNOWN = "Nothing was cancelled: Redis does not know this run, or no longer."


def cancel(hands: Hands, form: Form) -> Deed:
    """Cancel a run, as `tokenmill cancel` does."""
    run = form.get("run")
    if not is_run_id(run):
        return Deed("cancel run", run, _UNKNOWN)
    try:
        cancelled = cancel_run(hands.connection, run)
    except UnknownRun:
        return Deed("cancel run", run, _UNKNOWN)
    except RunResubmitted:
        return Deed("cancel run", run, "The run was submitted again meanwhile, and goes on.")
    jobs = f"{cancelled.removed:,} job{'' if cancelled.removed == 1 else 's'}"
    outcome = (
        f"The run was cancelled: {jobs} taken from the queue, {cancelled.stopped:,} told to stop. "
        "Submitting it again resumes it."
    )
    return Deed("cancel run", run, outcome)
