"""The log: its formats, and each record on one line that a terminal shows as it is."""

import logging
import re
import sys
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, TextIO

from jobs.common.display import printable

MAX_ARGUMENT_CHARS = 1000
"""Most characters of each value in a message: a job's id is logged before its length is checked."""

_COLOUR = re.compile(r"\x1b\[(?:0[1-6]|3\d(?:;01)?|39;49;00)m")
"""What RQ puts around names on a terminal. A producer may too, so none is shown."""

#: The attribute of a log record that names its job.
JOB_ID = "job_id"

_JOB, _VALUE = re.compile(r"\b[Jj]ob %s"), re.compile(r"%[a-z.0-9]")


class PlainLine(logging.Filter):
    """Cuts the values of a record's message, escapes what is not printable, and notes of which job a record is."""

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.args, tuple):
            record.args = tuple(map(_cut, record.args))
            place = _place_of_job(record.msg)
            if place is not None and place < len(record.args):
                setattr(record, JOB_ID, printable(str(record.args[place])))
        record.msg, record.args = printable(_COLOUR.sub("", record.getMessage())), None
        return True


#: What all loggers have: one that is added again changes nothing.
PLAIN = PlainLine()


@lru_cache(maxsize=256)
def _place_of_job(message: object) -> int | None:
    """Return which of a message's values is a job's id: the first behind "job", as in all of ours and of RQ's."""
    if not isinstance(message, str) or (found := _JOB.search(message)) is None:
        return None
    return len(_VALUE.findall(message, 0, found.start()))


def _cut(value: Any) -> Any:
    if isinstance(value, (int, float)):
        return value
    text = str(value)
    return value if len(text) <= MAX_ARGUMENT_CHARS else f"{text[:MAX_ARGUMENT_CHARS]}..."


VARIABLE = "TOKENMILL_LOG_FORMAT"
AUTO, TEXT, JSON = "auto", "text", "json"


def checked_format(value: str) -> str:
    if value not in (AUTO, TEXT, JSON):
        raise ValueError("expected text, json, or auto: text on a terminal, JSON elsewhere")
    return value


def is_json(wanted: str, stream: TextIO) -> bool:
    return wanted == JSON or (wanted == AUTO and not stream.isatty())


def handle_all(formatter: logging.Formatter, named: Iterable[str] = ()) -> None:
    """Write the records of all loggers, errors to stderr, the rest to stdout. named: those whose own handlers go."""
    below, above = logging.StreamHandler(sys.stdout), logging.StreamHandler(sys.stderr)
    below.addFilter(lambda record: record.levelno < logging.ERROR)
    above.setLevel(logging.ERROR)
    for handler in (below, above):
        handler.setFormatter(formatter)
        logging.getLogger().addHandler(handler)
    for name in named:
        give_up_handlers(name)
    logging.captureWarnings(True)


def give_up_handlers(name: str) -> None:
    logger = logging.getLogger(name)
    logger.propagate = True
    logger.handlers.clear()
