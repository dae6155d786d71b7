"""Puts failed jobs back or deletes them: ticked ones, all of a group, or all."""

from collections.abc import Iterator, Sequence

from jobs.common.display import safe_name
from jobs.queues import RESUBMIT, count_queues, queue_names, requeue
from jobs.runs.queue_changes import delete_failed
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
    num_done = num_gone = num_cancelled = num_wrong = 0
    for queue, job_ids in _chosen(hands, form):
        chosen = job_ids
        if not is_insisting:
            hands.failures.look_at(queue, job_ids)
            chosen = [
                job_id
                for job_id in job_ids
                if hands.failures.remedy(queue, job_id) is not Remedy.CLIENT
            ]
        num_wrong += len(job_ids) - len(chosen)
        moves = requeue(hands.connection, queue, chosen)
        hands.failures.forget(queue, moves.done)
        num_done += len(moves.done)
        num_gone += len(moves.missing)
        num_cancelled += len(moves.cancelled)
        hands.tell(f"{num_done:,} put back")

    facts = [f"{num_done:,} put back"]
    if num_gone:
        facts.append(f"{num_gone:,} {_were(num_gone)} gone")
    outcome = f"{', '.join(facts)}."
    if num_wrong:
        outcome += (
            f" {num_wrong:,} stayed, because what they ask for is wrong and they would fail again: "
            "“Retry anyway” puts them back."
        )
    if num_cancelled:
        outcome += f" {num_cancelled:,} of cancelled runs stayed: {RESUBMIT}."
    return Deed("retry", _about(form), outcome)


def delete(hands: Hands, form: Form) -> Deed:
    """Delete failed jobs."""
    num_done = num_gone = 0
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
