"""What the page's buttons do. Each action returns a word for its outcome, which `notice` turns into a text."""

from redis import Redis

from jobs.errors import RunResubmitted, UnknownRun
from jobs.queues import REQUEUE_LIMIT, RESUBMIT, Requeued, requeue, requeue_all
from jobs.runs.control import cancel_run as cancel
from jobs.runs.job_cancel import JobCancel
from jobs.runs.job_cancel import cancel_job as cancel_one
from jobs.runs.plans.names import is_run_id


def retry_one(connection: Redis, form: dict[str, str]) -> str:
    """Put a failed job back on its queue. form: queue, job_id."""
    return _retried(requeue(connection, form.get("queue", ""), [form.get("job_id", "")]))


def retry_all(connection: Redis, form: dict[str, str]) -> str:
    """Put the failed jobs of a queue back, the oldest first, REQUEUE_LIMIT at most. form: queue."""
    return _retried(requeue_all(connection, form.get("queue", ""), REQUEUE_LIMIT))


def _retried(found: Requeued) -> str:
    if found.cancelled:
        return f"retried-{len(found.done)}-{len(found.cancelled)}"
    return f"retried-{len(found.done)}" if found.done else "gone"


def cancel_run(connection: Redis, form: dict[str, str]) -> str:
    """Cancel a run, as `tokenmill cancel` does. form: run."""
    run = form.get("run", "")
    if not is_run_id(run):
        return "norun"
    try:
        cancelled = cancel(connection, run)
    except UnknownRun:
        return "norun"
    except RunResubmitted:
        return "resubmitted"
    return f"run-{cancelled.removed}-{cancelled.stopped}"


def cancel_job(connection: Redis, form: dict[str, str]) -> str:
    """Cancel a job that waits, or have one that runs stopped. form: job_id."""
    done = cancel_one(connection, form.get("job_id", ""))
    return "ended" if done is JobCancel.GONE else str(done.value)


_RETRIED = "{} put back on the queue."
_FIXED = {
    "gone": "Nothing was put back: the job is not among the failed ones of its queue any more.",
    "removed": "The job was cancelled: it was taken from where it waited, and will not run.",
    "stopping": "The worker that has the job was told to stop it; it will be among the failed ones.",
    "ended": "Nothing was cancelled: the job neither waits nor runs any more.",
    "norun": "Nothing was cancelled: Redis does not know this run, or no longer.",
    "resubmitted": "The run was submitted again meanwhile, and goes on.",
}


def notice(done: str) -> str:
    """Return the text for an action's word, "" for one that is none. done: a word, and counts behind it."""
    code, *counts = done.split("-")
    numbers = [
        int(each) if each.isascii() and each.isdigit() and len(each) < 8 else 0 for each in counts
    ]
    if code == "retried" and len(numbers) in (1, 2):
        num_done, num_cancelled = [*numbers, 0][:2]
        done = _RETRIED.format(_jobs(num_done))
        return (
            f"{done} {_jobs(num_cancelled)} of cancelled runs stayed: {RESUBMIT}."
            if num_cancelled
            else done
        )
    if code == "run" and len(numbers) == 2:
        removed, stopped = numbers
        return (
            f"The run was cancelled: {_jobs(removed)} taken from the queue, {stopped:,} told to stop. "
            "Submitting it again resumes it."
        )
    return _FIXED.get(done, "")


def _jobs(number: int) -> str:
    return f"{number:,} job{'' if number == 1 else 's'}"
