"""What the I/O thread is told by people, beside what the engine reports."""

import enum
from dataclasses import dataclass


class Shutdown(enum.Enum):
    """How a person asked the worker to stop."""

    WARM = "warm"
    COLD = "cold"


@dataclass(frozen=True)
class StopJob:
    """A person asked for one job to be stopped; with an execution's id, only while that one runs it."""

    job_id: str
    execution_id: str | None = None
