"""Puts failed jobs back or deletes them: the ticked jobs, the jobs of a group, or all."""

from collections.abc import Iterator, Sequence

from jobs.common.display import safe_name
from jobs.queues import RESUBMIT, Requeued, count_queues, queue_names, requeue
from jobs.queues.changes import delete_failed
from tokenmill.dashboard.actions.forms import Form
from tokenmill.dashboard.actions.runner import ActionContext, ActionResult
from tokenmill.dashboard.failures.groups import Remedy

#: The most jobs that are handled at once. After each chunk the action reports its progress.
CHUNK = 500
#: The most queues whose failed jobs are read.
MAX_QUEUES = 200


def retry(context: ActionContext, form: Form) -> ActionResult:
    """Put failed jobs back on their queues.

    Jobs whose own arguments are wrong are put back only if the form has the field `insist`.
    """
    is_insisting = bool(form.get("insist"))
    total = Requeued()
    num_wrong = 0
    for queue, job_ids in _chosen_jobs(context, form):
        to_requeue = job_ids
        if not is_insisting:
            to_requeue = _without_wrong(context, queue, job_ids)
        num_wrong += len(job_ids) - len(to_requeue)
        requeued = requeue(context.connection, queue, to_requeue)
        context.failures.forget(queue, requeued.done)
        total.add(requeued)
        context.report(f"{len(total.done):,} put back")

    outcome = f"{len(total.done):,} put back{_gone_text(len(total.missing))}."
    if num_wrong:
        button = "“Retry anyway” beside their cause" if form.get("all") else "“Retry ticked anyway”"
        outcome += (
            f" {num_wrong:,} stayed, because what they ask for is wrong and they would fail again: "
            f"{button} puts them back."
        )
    if total.cancelled:
        outcome += f" {len(total.cancelled):,} of cancelled runs stayed: {RESUBMIT}."
    return ActionResult("retry", _about(form), outcome)


def _without_wrong(context: ActionContext, queue: str, job_ids: Sequence[str]) -> list[str]:
    """Leave out the jobs of a queue whose own arguments are known to be wrong, and return the rest."""
    context.failures.read_jobs(queue, job_ids)
    remedy = context.failures.remedy
    return [job_id for job_id in job_ids if remedy(queue, job_id) is not Remedy.CLIENT]


def delete(context: ActionContext, form: Form) -> ActionResult:
    """Delete failed jobs."""
    num_done = 0
    num_gone = 0
    for queue, job_ids in _chosen_jobs(context, form):
        deleted = delete_failed(context.connection, queue, job_ids)
        context.failures.forget(queue, job_ids)
        num_done += len(deleted)
        num_gone += len(job_ids) - len(deleted)
        context.report(f"{num_done:,} deleted")
    if num_done == 0 and num_gone == 0:
        return ActionResult("delete", _about(form), "Nothing was deleted: tick jobs first.")
    return ActionResult("delete", _about(form), f"{num_done:,} deleted{_gone_text(num_gone)}.")


def _chosen_jobs(context: ActionContext, form: Form) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield (queue, job ids) for the jobs that a form chooses, in chunks.

    These are the ticked jobs. If the form has the field `all`, they are the failed jobs of its `group` and `queue`. An
    empty `group` stands for all groups, and an empty `queue` for all queues.
    """
    if not form.get("all"):
        yield from form.jobs().items()
        return
    names = queue_names(context.connection)[:MAX_QUEUES]
    counts = count_queues(context.connection, names)
    queues_with_failed = [queue.name for queue in counts if queue.counts["failed"]]
    context.failures.finish(
        queues_with_failed, lambda number: context.report(f"{number:,} looked at")
    )

    ids_by_queue: dict[str, list[str]] = {}
    for queue, job_id in context.failures.jobs_of(form.get("queue"), form.get("group")):
        ids_by_queue.setdefault(queue, []).append(job_id)
    for queue, job_ids in ids_by_queue.items():
        for start in range(0, len(job_ids), CHUNK):
            yield queue, job_ids[start : start + CHUNK]


def _about(form: Form) -> str:
    """Return a text for the log that says which jobs a form chooses."""
    if form.get("all"):
        text = "all failed jobs"
        if form.get("group"):
            text = f"all that failed with {form.get('cause')}"
        if form.get("queue"):
            text += f" on {safe_name(form.get('queue'))}"
        return text

    job_ids: list[str] = []
    for ids_of_queue in form.jobs().values():
        job_ids += ids_of_queue
    if not job_ids:
        return "no job: none was ticked"
    first = safe_name(job_ids[0], 80)
    if len(job_ids) == 1:
        return first
    return f"{first} and {len(job_ids) - 1:,} more"


def _gone_text(number: int) -> str:
    """Return the end of a sentence that says how many jobs were gone; "" for none."""
    if number == 0:
        return ""
    verb = "was" if number == 1 else "were"
    return f", {number:,} {verb} gone"
