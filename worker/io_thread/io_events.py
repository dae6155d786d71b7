"""People's events for the I/O thread, beside the engine's reports."""

import enum
from dataclasses import dataclass


class Shutdown(enum.Enum):
    """A person's way of asking the worker to stop."""

    WARM = "warm"
    COLD = "cold"


@dataclass(frozen=True)
class StopJob:
    """A person's wish to stop one job; with an execution's id, only while that one runs it."""

    job_id: str
    execution_id: str | None = None
