"""How logs are written: text for people, a JSON object a line for programs."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable
from typing import TextIO

VARIABLE = "TOKENMILL_LOG_FORMAT"
AUTO, TEXT, JSON = "auto", "text", "json"


def checked_format(value: str) -> str:
    """Return a format. Raises ValueError, which says what is expected."""
    if value not in (AUTO, TEXT, JSON):
        raise ValueError("expected text, json, or auto: text on a terminal, JSON elsewhere")
    return value


def is_json(wanted: str, stream: TextIO) -> bool:
    """Whether the log is JSON there."""
    return wanted == JSON or (wanted == AUTO and not stream.isatty())


def handle_all(formatter: logging.Formatter, named: Iterable[str] = ()) -> None:
    """Write what any logger of this process is told by this formatter: errors to stderr, the rest to stdout.

    named: loggers whose handlers are given up for that. Warnings of Python are logged too.
    """
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
    """Let the handlers of all loggers write what this one is told, and those below it."""
    logger = logging.getLogger(name)
    logger.propagate = True
    for handler in [*logger.handlers]:
        logger.removeHandler(handler)
