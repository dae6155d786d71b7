"""A record of a log as a line of JSON, by structlog. Imported only where logs are written so."""

import json
import logging
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

import structlog

from jobs.common.plain_log import JOB_ID

#: Of an exception's text, and frames of its traceback, as much as a line may hold.
MAX_EXCEPTION_CHARS, MAX_FRAMES = 2000, 20
#: As json.dumps: an encoder made for each line takes as long as all the rest.
_json = json.JSONEncoder(default=str).encode

_transform = structlog.tracebacks.ExceptionDictTransformer(show_locals=False, max_frames=MAX_FRAMES)


class JsonLine(logging.Formatter):
    """Writes a record as one line; of an exception no values of variables, which hold prompts.

    bound: fields of every line. more_of: what else a job's id tells.
    """

    def __init__(
        self, bound: Mapping[str, str], more_of: Callable[[str], Mapping[str, Any]] | None = None
    ) -> None:
        super().__init__()
        self._bound, self._more_of = dict(bound), more_of

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
        job_id = record.__dict__.get(JOB_ID)
        if isinstance(job_id, str):
            fields[JOB_ID] = job_id
            if self._more_of is not None:
                fields.update(self._more_of(job_id))
        if record.exc_info and record.exc_info[0] is not None:
            told = _transform(record.exc_info)
            fields["exception"] = [
                {**each, "exc_value": str(each["exc_value"])[:MAX_EXCEPTION_CHARS]} for each in told
            ]
        return _json(fields)
