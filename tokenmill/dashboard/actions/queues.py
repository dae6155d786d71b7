"""Empties queues, moves single jobs to the front, and cancels single jobs."""

from jobs.common.display import safe_name
from jobs.queues.changes import empty_queue, move_to_front
from jobs.runs.job_cancel import JobCancel, cancel_job
from tokenmill.dashboard.actions.forms import Form
from tokenmill.dashboard.actions.runner import ActionContext, ActionResult

#: By what `cancel_job` did: the sentence for a person.
_OUTCOMES = {
    JobCancel.REMOVED: "The job was cancelled: it was taken from where it waited, and will not run.",
    JobCancel.STOPPING: "The worker that has the job was told to stop it; it will be among the failed ones.",
    JobCancel.GONE: "Nothing was cancelled: the job neither waits nor runs any more.",
}


def empty(context: ActionContext, form: Form) -> ActionResult:
    """Delete all waiting jobs of a queue, if the field `confirm` has the queue's name."""
    queue = form.get("queue")
    if not queue or form.get("confirm").strip() != queue:
        return ActionResult(
            "empty", queue, "Nothing was deleted: what was typed is not the queue's name."
        )
    num_taken = empty_queue(
        context.connection, queue, lambda number: context.report(f"{number:,} waiting jobs deleted")
    )
    return ActionResult(
        "empty", queue, f"{num_taken:,} waiting jobs of {safe_name(queue)} were deleted."
    )


def to_front(context: ActionContext, form: Form) -> ActionResult:
    """Move a waiting job to the front of its queue."""
    queue = form.get("queue")
    job_id = form.get("job_id")
    if move_to_front(context.connection, queue, job_id):
        outcome = "The job is the first of its queue now."
    else:
        outcome = "Nothing was moved: the job does not wait any more."
    return ActionResult("put to the front", job_id, outcome)


def cancel(context: ActionContext, form: Form) -> ActionResult:
    """Cancel a waiting job, or have its worker stop a running job."""
    job_id = form.get("job_id")
    cancelled = cancel_job(context.connection, job_id)
    return ActionResult("cancel", job_id, _OUTCOMES[cancelled])
