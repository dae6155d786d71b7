"""What a look at a model or a machine has found."""

from typing import Literal, NamedTuple

from engine.errors import ConfigError


class Observation(NamedTuple):
    """subject: what was looked at, in a word. grade: "fault" where an engine would not start or not answer.
    mend: what to do, "" where nothing is to be done."""

    subject: str
    grade: Literal["ok", "warning", "fault"]
    found: str
    mend: str = ""


def fault_of(subject: str, error: ConfigError) -> Observation:
    """What an error says, whose last clause says what to do."""
    found, _, mend = str(error).rpartition("; ")
    return Observation(subject, "fault", found or mend, mend if found else "")
