"""Writes the log: chooses its format, and puts each record on one line that is safe for a terminal."""

import logging
import re
import sys
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, TextIO

from jobs.common.display import printable

#: The most characters of each value in a message. RQ logs a job's id before anybody checks the id's length.
MAX_ARGUMENT_CHARS = 1000

#: The colours that RQ puts around names on a terminal. They are removed, because a producer may write them too.
_COLOUR = re.compile(r"\x1b\[(?:0[1-6]|3\d(?:;01)?|39;49;00)m")

#: The attribute of a log record that names its job.
JOB_ID_FIELD = "job_id"

#: A job's id in the format of a message.
_JOB = re.compile(r"\b[Jj]ob %s")
#: Any value in the format of a message.
_VALUE = re.compile(r"%[a-z.0-9]")


class PlainLine(logging.Filter):
    """Cuts the values in a record's message, escapes characters that are not printable, and notes the job's id."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Cut a record's values, make its message printable, and note the job's id. Always returns True."""
        if isinstance(record.args, tuple):
            record.args = tuple(map(_cut, record.args))
            index = _index_of_job(record.msg)
            if index is not None and index < len(record.args):
                job_id = str(record.args[index])
                setattr(record, JOB_ID_FIELD, printable(job_id))
        record.msg = printable(_COLOUR.sub("", record.getMessage()))
        record.args = None  # the message already contains them
        return True


#: The filter of all loggers. Adding it to a logger again changes nothing.
PLAIN = PlainLine()


@lru_cache(maxsize=256)
def _index_of_job(message: object) -> int | None:
    """Return the index of the job's id among a message's values; None if the message has no such id.

    message: the format of the message, in which the id follows the word "job".
    """
    if not isinstance(message, str):
        return None
    match = _JOB.search(message)
    if match is None:
        return None
    values_before_id = _VALUE.findall(message, 0, match.start())
    return len(values_before_id)


def _cut(value: Any) -> Any:
    """Return a number as it is, so that %d can format it. Cut any other value after MAX_ARGUMENT_CHARS."""
    if isinstance(value, (int, float)):
        return value
    text = str(value)
    return value if len(text) <= MAX_ARGUMENT_CHARS else f"{text[:MAX_ARGUMENT_CHARS]}..."


VARIABLE = "TOKENMILL_LOG_FORMAT"
AUTO = "auto"
TEXT = "text"
JSON = "json"


def checked_format(value: str) -> str:
    """Return the value if it is a log format. Otherwise raises ValueError."""
    if value not in (AUTO, TEXT, JSON):
        raise ValueError("expected text, json, or auto: text on a terminal, JSON elsewhere")
    return value


def is_json(log_format: str, stream: TextIO) -> bool:
    """Whether the log is written to a stream as JSON. log_format: AUTO, TEXT or JSON."""
    return log_format == JSON or (log_format == AUTO and not stream.isatty())


def handle_all(formatter: logging.Formatter, logger_names: Iterable[str] = ()) -> None:
    """Write the records of all loggers: errors to stderr, and everything else to stdout.

    logger_names: loggers whose own handlers are removed.
    """
    to_stdout = logging.StreamHandler(sys.stdout)
    to_stdout.addFilter(lambda record: record.levelno < logging.ERROR)
    to_stderr = logging.StreamHandler(sys.stderr)
    to_stderr.setLevel(logging.ERROR)
    for handler in (to_stdout, to_stderr):
        handler.setFormatter(formatter)
        logging.getLogger().addHandler(handler)
    for name in logger_names:
        remove_handlers(name)
    logging.captureWarnings(True)


def remove_handlers(name: str) -> None:
    """Remove a logger's own handlers. The root logger's handlers then write its records."""
    logger = logging.getLogger(name)
    logger.propagate = True
    logger.handlers.clear()
