"""What an action came to, in words of our own: anybody can write a link."""

from __future__ import annotations

_RETRIED = "{} put back on the queue."
_FIXED = {
    "gone": "Nothing was put back: the job is not among the failed ones of its queue any more.",
    "removed": "The job was cancelled: it was taken from where it waited, and will not run.",
    "stopping": "The worker that has the job was told to stop it; it will be among the failed ones.",
    "ended": "Nothing was cancelled: the job neither waits nor runs any more.",
    "norun": "Nothing was cancelled: Redis does not know this run, or no longer.",
    "busy": "The run was not cancelled: somebody plans or cancels it at this moment. Try again.",
    "resubmitted": "The run was submitted again meanwhile, and goes on.",
}


def notice(done: str) -> str:
    """Return the text for an action's word, "" for one that is none. done: a word, and counts behind it."""
    code, *counts = done.split("-")
    numbers = [int(each) if each.isascii() and each.isdigit() and len(each) < 8 else 0 for each in counts]
    if code == "retried" and len(numbers) == 1:
        return _RETRIED.format(_jobs(numbers[0]))
    if code == "run" and len(numbers) == 2:
        removed, stopped = numbers
        return (
            f"The run was cancelled: {_jobs(removed)} taken from the queue, {stopped:,} told to stop. "
            "Submitting it again resumes it."
        )
    return _FIXED.get(done, "")


def _jobs(number: int) -> str:
    return f"{number:,} job{'' if number == 1 else 's'}"
