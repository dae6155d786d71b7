"""Puts failed jobs back or deletes them: ticked ones, all of a group, or all."""

from collections.abc import Iterator, Sequence

from jobs.common.display import safe_name
from jobs.queues import RESUBMIT, Requeued, count_queues, queue_names, requeue
from jobs.queues.changes import delete_failed
from tokenmill.dashboard.actions.forms import Form
from tokenmill.dashboard.actions.runner import ActionContext, ActionResult
from tokenmill.dashboard.failures.groups import Remedy

#: Jobs after which a page is told how far the action is.
CHUNK = 500
#: The most queues that are looked at.
MAX_QUEUES = 200


def retry(context: ActionContext, form: Form) -> ActionResult:
    """Put failed jobs back on their queues. Those whose own arguments are wrong need the field `insist`."""
    is_insisting = bool(form.get("insist"))
    moved = Requeued()
    num_wrong = 0
    for queue, job_ids in _chosen(context, form):
        helped = job_ids if is_insisting else _not_wrong(context, queue, job_ids)
        num_wrong += len(job_ids) - len(helped)
        moves = requeue(context.connection, queue, helped)
        context.failures.forget(queue, moves.done)
        moved.add(moves)
        context.report(f"{len(moved.done):,} put back")

    num_gone = len(moved.missing)
    gone = f", {num_gone:,} {_were(num_gone)} gone" if num_gone else ""
    outcome = f"{len(moved.done):,} put back{gone}."
    if num_wrong:
        button = "“Retry anyway” beside their cause" if form.get("all") else "“Retry ticked anyway”"
        outcome += (
            f" {num_wrong:,} stayed, because what they ask for is wrong and they would fail again: "
            f"{button} puts them back."
        )
    if moved.cancelled:
        outcome += f" {len(moved.cancelled):,} of cancelled runs stayed: {RESUBMIT}."
    return ActionResult("retry", _about(form), outcome)


def _not_wrong(context: ActionContext, queue: str, job_ids: Sequence[str]) -> list[str]:
    """Return the jobs of which trying again may help, as far as is known."""
    context.failures.look_at(queue, job_ids)
    remedy = context.failures.remedy
    return [job_id for job_id in job_ids if remedy(queue, job_id) is not Remedy.CLIENT]


def delete(context: ActionContext, form: Form) -> ActionResult:
    """Delete failed jobs."""
    num_done = 0
    num_gone = 0
    for queue, job_ids in _chosen(context, form):
        done = delete_failed(context.connection, queue, job_ids)
        context.failures.forget(queue, job_ids)
        num_done += len(done)
        num_gone += len(job_ids) - len(done)
        context.report(f"{num_done:,} deleted")
    if num_done == num_gone == 0:
        return ActionResult("delete", _about(form), "Nothing was deleted: tick jobs first.")
    gone = f", {num_gone:,} {_were(num_gone)} gone" if num_gone else ""
    return ActionResult("delete", _about(form), f"{num_done:,} deleted{gone}.")


def _chosen(context: ActionContext, form: Form) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield the jobs that a form means, by queue: those ticked, or with the field `all` those of a group or queue."""
    if not form.get("all"):
        yield from form.jobs().items()
        return
    names = queue_names(context.connection)[:MAX_QUEUES]
    with_failed = [
        queue.name for queue in count_queues(context.connection, names) if queue.counts["failed"]
    ]
    context.failures.finish(with_failed, lambda number: context.report(f"{number:,} looked at"))
    ids_of: dict[str, list[str]] = {}
    for queue, job_id in context.failures.jobs_of(form.get("queue"), form.get("group")):
        ids_of.setdefault(queue, []).append(job_id)
    for queue, job_ids in ids_of.items():
        for start in range(0, len(job_ids), CHUNK):
            yield queue, job_ids[start : start + CHUNK]


def _about(form: Form) -> str:
    """Say which jobs a form means."""
    if form.get("all"):
        jobs = (
            f"all that failed with {form.get('cause')}" if form.get("group") else "all failed jobs"
        )
        return f"{jobs} on {safe_name(form.get('queue'))}" if form.get("queue") else jobs
    ids = [job_id for job_ids in form.jobs().values() for job_id in job_ids]
    if not ids:
        return "no job: none was ticked"
    more = f" and {len(ids) - 1:,} more" if len(ids) > 1 else ""
    return f"{safe_name(ids[0], 80)}{more}"


def _were(number: int) -> str:
    return "was" if number == 1 else "were"
