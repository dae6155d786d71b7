"""Puts failed jobs back or deletes them: ticked ones, all of a group, or all."""

from collections.abc import Iterator, Sequence

from jobs.common.display import safe_name
from jobs.queues import RESUBMIT, Requeued, count_queues, queue_names, requeue
from jobs.queues.changes import delete_failed
from tokenmill.dashboard.actions.deeds import Deed, Hands
from tokenmill.dashboard.actions.forms import Form
from tokenmill.dashboard.failures.groups import Remedy

#: Jobs after which a page is told how far the action is.
CHUNK = 500
#: The most queues that are looked at.
MAX_QUEUES = 200


def retry(hands: Hands, form: Form) -> Deed:
    """Put failed jobs back on their queues. Those whose own arguments are wrong need the field `insist`."""
    is_insisting = bool(form.get("insist"))
    moved = Requeued()
    num_wrong = 0
    for queue, job_ids in _chosen(hands, form):
        helped = job_ids if is_insisting else _not_wrong(hands, queue, job_ids)
        num_wrong += len(job_ids) - len(helped)
        moves = requeue(hands.connection, queue, helped)
        hands.failures.forget(queue, moves.done)
        moved.add(moves)
        hands.tell(f"{len(moved.done):,} put back")

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
    return Deed("retry", _about(form), outcome)


def _not_wrong(hands: Hands, queue: str, job_ids: Sequence[str]) -> list[str]:
    """Return the jobs of which trying again may help, as far as is known."""
    hands.failures.look_at(queue, job_ids)
    remedy = hands.failures.remedy
    return [job_id for job_id in job_ids if remedy(queue, job_id) is not Remedy.CLIENT]


def delete(hands: Hands, form: Form) -> Deed:
    """Delete failed jobs."""
    num_done = 0
    num_gone = 0
    for queue, job_ids in _chosen(hands, form):
        done = delete_failed(hands.connection, queue, job_ids)
        hands.failures.forget(queue, job_ids)
        num_done += len(done)
        num_gone += len(job_ids) - len(done)
        hands.tell(f"{num_done:,} deleted")
    gone = f", {num_gone:,} {_were(num_gone)} gone" if num_gone else ""
    return Deed("delete", _about(form), f"{num_done:,} deleted{gone}.")


def _chosen(hands: Hands, form: Form) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield the jobs that a form means, by queue: those ticked, or with the field `all` those of a group or queue."""
    if not form.get("all"):
        yield from form.jobs().items()
        return
    names = queue_names(hands.connection)[:MAX_QUEUES]
    with_failed = [
        queue.name for queue in count_queues(hands.connection, names) if queue.counts["failed"]
    ]
    hands.failures.finish(with_failed, lambda number: hands.tell(f"{number:,} looked at"))
    ids_of: dict[str, list[str]] = {}
    for queue, job_id in hands.failures.jobs_of(form.get("queue"), form.get("group")):
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
