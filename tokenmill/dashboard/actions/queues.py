"""Empties queues, and changes where single jobs stand."""

from jobs.common.display import safe_name
from jobs.queues.changes import empty_queue, move_to_front
from jobs.runs.job_cancel import JobCancel, cancel_job
from tokenmill.dashboard.actions.forms import Form
from tokenmill.dashboard.actions.runner import ActionContext, ActionResult

_CANCELLED = {
    JobCancel.REMOVED: "The job was cancelled: it was taken from where it waited, and will not run.",
    JobCancel.STOPPING: "The worker that has the job was told to stop it; it will be among the failed ones.",
    JobCancel.GONE: "Nothing was cancelled: the job neither waits nor runs any more.",
}


def empty(context: ActionContext, form: Form) -> ActionResult:
    """Take all waiting jobs from a queue and delete them. The field `confirm` has the queue's name."""
    queue = form.get("queue")
    if form.get("confirm").strip() != queue or not queue:
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
    outcome = "Nothing was moved: the job does not wait any more."
    if move_to_front(context.connection, queue, job_id):
        outcome = "The job is the first of its queue now."
    return ActionResult("put to the front", job_id, outcome)


def cancel(context: ActionContext, form: Form) -> ActionResult:
    """Cancel a job that waits, or have one that runs stopped."""
    job_id = form.get("job_id")
    return ActionResult("cancel", job_id, _CANCELLED[cancel_job(context.connection, job_id)])
