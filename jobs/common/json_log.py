"""Writes records of a log as lines of JSON, with structlog. Imported only if logs are written as JSON."""

import json
import logging
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

import structlog

from jobs.common.plain_log import JOB_ID_FIELD

#: The most characters of an exception's text in a line.
MAX_EXCEPTION_CHARS = 2000
#: The most frames of an exception's traceback in a line.
MAX_FRAMES = 20
#: One encoder serves all lines. json.dumps would make an encoder for each line, which would double the time for a line.
_json = json.JSONEncoder(default=str).encode

_exception_dicts = structlog.tracebacks.ExceptionDictTransformer(
    show_locals=False, max_frames=MAX_FRAMES
)


class JsonLine(logging.Formatter):
    """Formats a log record as one line of JSON. Tracebacks show no variables, because their values may hold prompts.

    bound: fields that are added to every line.
    job_fields: takes a job's id, and returns further fields for lines about that job.
    """

    def __init__(
        self, bound: Mapping[str, str], job_fields: Callable[[str], Mapping[str, Any]] | None = None
    ) -> None:
        super().__init__()
        self._bound = dict(bound)
        self._job_fields = job_fields

    def format(self, record: logging.LogRecord) -> str:
        """Return a record as a line of JSON."""
        fields: dict[str, Any] = {
            "timestamp": datetime.fromtimestamp(record.created, UTC).isoformat(
                timespec="microseconds"
            ),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
            **self._bound,
        }
        job_id = record.__dict__.get(JOB_ID_FIELD)
        if isinstance(job_id, str):
            fields[JOB_ID_FIELD] = job_id
            if self._job_fields is not None:
                fields.update(self._job_fields(job_id))
        if record.exc_info and record.exc_info[0] is not None:
            exceptions = []
            for exception in _exception_dicts(record.exc_info):
                text = str(exception["exc_value"])[:MAX_EXCEPTION_CHARS]
                exceptions.append({**exception, "exc_value": text})
            fields["exception"] = exceptions
        return _json(fields)
