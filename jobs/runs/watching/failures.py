"""Returns the error of a failed job as one line, safe to show."""

from redis import Redis

from jobs.common import rq_jobs
from jobs.common.display import MAX_TEXT_CHARS, safe_name
from jobs.errors import FAULT_PREFIX


def failure_text(connection: Redis, job_id: str) -> str:
    """Return the last line of a failed job's error, or a sentence that says that it left no error."""
    error = rq_jobs.error_text(rq_jobs.last_entry(connection, job_id))
    return error_line(error) or "it left no error"


def error_line(error: str) -> str:
    """Return the last line of an error; "" if it has none. Lines that only say who is at fault do not count."""
    lines = [line for line in error.strip().splitlines() if not line.startswith(FAULT_PREFIX)]
    if not lines:
        return ""
    return safe_name(lines[-1], MAX_TEXT_CHARS)
