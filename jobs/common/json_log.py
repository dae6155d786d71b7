"""A record of a log as a line of JSON, by structlog. Imported only where logs are written so."""

import json
import logging
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

import structlog
from structlog.typing import EventDict

from jobs.common.plain_log import JOB_ID, without_colour

#: Of an exception's text, and frames of its traceback, as much as a line may hold.
MAX_EXCEPTION_CHARS, MAX_FRAMES = 2000, 20

#: Of all that is told of exceptions: whoever raised them may have added notes, and grouped or chained others.
MAX_EXCEPTIONS_CHARS = 50_000

#: Of a message. Ours are far shorter; a library's may repeat what it was given.
MAX_EVENT_CHARS = 20_000

_ENCODER = json.JSONEncoder(default=str)


class JsonLine(logging.Formatter):
    """Writes a record as one line: timestamp (UTC), level, logger, event, and what is known of its job.

    bound: fields of every line. more_of: what else a job's id tells. Of an exception there are type, text and
    frames, without the values of variables, which hold prompts. What is not ASCII is escaped, as JSON does.

    structlog's own ProcessorFormatter, which copies each record to serve loggers of both kinds, took three
    times as long as a line of text.
    """

    def __init__(
        self, bound: Mapping[str, str], more_of: Callable[[str], Mapping[str, Any]] | None = None
    ) -> None:
        super().__init__()
        self._bound, self._more_of = dict(bound), more_of
        transform = structlog.tracebacks.ExceptionDictTransformer(show_locals=False, max_frames=MAX_FRAMES)
        self._with_exception = structlog.processors.ExceptionRenderer(_Cut(transform))
        self._render = structlog.processors.JSONRenderer(_json)

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, without its end."""
        fields: EventDict = {
            "timestamp": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": without_colour(record.getMessage())[:MAX_EVENT_CHARS],
            **self._bound,
        }
        job_id = record.__dict__.get(JOB_ID)
        if isinstance(job_id, str):
            fields[JOB_ID] = job_id
            if self._more_of is not None:
                fields.update(self._more_of(job_id))
        if record.exc_info and record.exc_info[0] is not None:
            fields["exc_info"] = record.exc_info
            fields = self._with_exception(None, "", fields)
        return str(self._render(None, "", fields))


class _Cut:
    """Cuts the texts of exceptions; where that is too much still, leaves their types and texts."""

    def __init__(self, transform: Callable[[Any], list[dict[str, Any]]]) -> None:
        self._transform = transform

    def __call__(self, exc_info: Any) -> list[dict[str, Any]]:
        found = self._transform(exc_info)
        for each in found:
            each["exc_value"] = str(each["exc_value"])[:MAX_EXCEPTION_CHARS]
        if len(_json(found)) > MAX_EXCEPTIONS_CHARS:
            kept = found[:1] if len(found) == 1 else [found[0], found[-1]]
            return [{name: each[name] for name in ("exc_type", "exc_value")} for each in kept]
        return found


def _json(value: Any, **options: Any) -> str:
    """As json.dumps. An encoder made for each line, as that makes one for such options, takes as long as the
    rest."""
    return _ENCODER.encode(value)
