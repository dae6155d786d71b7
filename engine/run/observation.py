"""Observation: a finding about a model or a machine."""

from typing import Literal, NamedTuple

from engine.errors import ConfigError


class Observation(NamedTuple):
    """A finding about `subject`. grade: "fault" if an engine would not start or not answer.

    mend: what to do, "" if nothing.
    """

    subject: str
    grade: Literal["ok", "warning", "fault"]
    text: str
    mend: str = ""


def fault_of(subject: str, error: ConfigError) -> Observation:
    """Make a finding of an error, whose last clause says what to do."""
    message = str(error)
    problem, _, mend = message.rpartition("; ")
    if not problem:
        return Observation(subject, "fault", message)
    return Observation(subject, "fault", problem, mend)
