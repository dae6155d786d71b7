"""EndedJob: an ended job, for metrics and traces."""

from dataclasses import dataclass


@dataclass(frozen=True)
class EndedJob:
    """A job that has ended on this worker.

    outcome: "finished", "failed" or "stopped"; reason: the error's name, or "".
    function: its name, or "refused"; is_function: it needed no engine.
    enqueued_at, began_at, ended_at: Unix seconds, the first as producers wrote it; None if not known.
    rows, row_errors: of a finished shard. rows_unasked: errors without a prompt; None if not known.
    """

    queue: str
    job_id: str
    function: str
    is_function: bool
    outcome: str
    reason: str
    enqueued_at: float | None
    began_at: float | None
    ended_at: float
    rows: int = 0
    row_errors: int = 0
    rows_unasked: int | None = None
