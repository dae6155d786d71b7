"""A job that has ended on this worker, as metrics and traces tell of it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class EndedJob:
    """outcome: "finished", "failed" or "stopped"; reason: the error's name, or "".

    function: what it called, or "refused"; is_function: it needed no engine.
    enqueued_at, began_at, ended_at: Unix seconds, the first as producers wrote it; None where not known.
    rows, row_errors: of a shard that is finished. rows_unasked: those of the errors that gave no prompt;
    None where that is not known.
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
