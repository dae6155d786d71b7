"""Sets up a worker's log, in RQ's text or with a JSON object in each line.

`LastingTrouble` keeps a trouble from filling the log.
"""

import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from rq.defaults import DEFAULT_LOGGING_DATE_FORMAT, DEFAULT_LOGGING_FORMAT
from rq.logutils import ColorizingStreamHandler, setup_loghandlers

from jobs.common.plain_log import JSON, PLAIN, VARIABLE, handle_all, is_json
from jobs.runs.plans.names import run_and_shard
from worker.errors import SettingsError

#: Loggers with handlers, which RQ or this module has added.
_LOGGERS = ("rq.worker", "rq.job", "rq.scheduler", "engine")


#: A trouble counts as over when it has not occurred for this many seconds.
OVER_S = 20.0


class LastingTrouble:
    """Logs a trouble such as an outage. Logs each kind of error once while the trouble lasts, then the trouble's end.
    A trouble that comes back within OVER_S of its end counts as lasting, so that a trouble that comes and goes does not
    fill the log. Any thread may use this class.
    """

    def __init__(
        self,
        log: logging.Logger,
        end_text: str,
        level: int = logging.ERROR,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """end_text: the line that is logged when the trouble is over. level: the level of the lines before that."""
        self._log = log
        self._end_text = end_text
        self._level = level
        self._clock = clock
        self._lock = threading.Lock()
        self._began_at: float | None = None  # None while there is no trouble
        self._last_at = 0.0
        self._ended_at = float("-inf")
        self._comes_and_goes = False
        self._num_times = 0
        self._kinds_logged = set[str]()

    @property
    def lasts(self) -> bool:
        """Whether the trouble occurred within the last OVER_S seconds."""
        return self._began_at is not None and self._clock() - self._last_at < OVER_S

    def note(self, kind: str, message: str, *args: object) -> None:
        """Note that the trouble occurred. Logs the message if it is the first of its kind since the trouble began."""
        with self._lock:
            self._end_if_over()
            self._last_at = self._clock()
            self._num_times += 1
            if self._began_at is None:
                self._began_at = self._last_at
                self._comes_and_goes = self._last_at - self._ended_at < OVER_S
            is_new = kind not in self._kinds_logged
            self._kinds_logged.add(kind)
        if is_new:
            self._log.log(self._level, message, *args)

    def note_absence(self) -> None:
        """Note that the trouble does not occur at present."""
        with self._lock:
            self._end_if_over()

    def note_end(self) -> None:
        """Note that the trouble is certainly over. Logs its end at once, unless the trouble comes and goes."""
        with self._lock:
            if self._began_at is None or self._comes_and_goes:
                self._end_if_over()
            else:
                self._end()

    def _end_if_over(self) -> None:
        """Log that the trouble is over, if it has not occurred for OVER_S seconds."""
        if self._began_at is not None and self._clock() - self._last_at >= OVER_S:
            self._end()

    def _end(self) -> None:
        """Log that the trouble is over."""
        assert self._began_at is not None
        lasted_s = self._last_at - self._began_at
        self._log.info("%s (seen %d times in %.0f s)", self._end_text, self._num_times, lasted_s)
        self._ended_at = self._clock()
        self._began_at = None
        self._num_times = 0
        self._kinds_logged.clear()


def start_log(
    worker_name: str, log_format: str, level: str | int | None, formats: tuple[str, str]
) -> bool:
    """Begin to write this process' log. Returns whether it is JSON.

    worker_name: stands in each line of JSON. log_format: the value of TOKENMILL_LOG_FORMAT. level, formats: the level
    and the formats of text, as given to `rq worker`. If the program has set up logging itself, the log stays text.
    Raises SettingsError if JSON is asked for but not possible.
    """
    for name in ("rq.worker", "rq.scheduler"):
        setup_loghandlers(level, *formats, name=name)
        logging.getLogger(name).addFilter(PLAIN)

    has_text_formats = formats != (DEFAULT_LOGGING_DATE_FORMAT, DEFAULT_LOGGING_FORMAT)
    if log_format == JSON and has_text_formats:
        raise SettingsError(
            f"{VARIABLE}=json, and --log-format or --date-format is for text: leave one of them out"
        )
    writes_json = False
    if not has_text_formats and is_json(log_format, sys.stdout) and not _is_configured():
        writes_json = _write_json(worker_name, is_asked_for=log_format == JSON)

    effective_level = logging.getLogger("rq.worker").getEffectiveLevel()
    # RQ adds no handler for the engine, which logs how it computes a model.
    setup_loghandlers(effective_level, *formats, name="engine")
    return writes_json


def _write_json(worker_name: str, is_asked_for: bool) -> bool:
    """Write the log as JSON from now on. Returns False, and leaves the log as text, if structlog is not installed.

    Raises SettingsError if JSON was asked for and structlog is missing.
    """
    try:
        from jobs.common.json_log import JsonLine
    except ImportError as error:
        if is_asked_for:
            raise SettingsError(
                f"{VARIABLE}=json needs structlog ({error}): pip install structlog"
            ) from None
        logging.getLogger("rq.worker").warning("the log is text, as structlog is not installed")
        return False
    handle_all(JsonLine({"worker": worker_name}, _run_fields), _LOGGERS)
    return True


def _is_configured() -> bool:
    """Whether the program has added a handler of its own to a log."""
    if logging.getLogger().handlers:
        return True
    for name in _LOGGERS:
        for handler in logging.getLogger(name).handlers:
            if type(handler) is not ColorizingStreamHandler:  # the class of RQ's handlers
                return True
    return False


def _run_fields(job_id: str) -> Mapping[str, Any]:
    """Return the run and the shard of a job, as fields of its log lines. A job without a run has none."""
    run_shard = run_and_shard(job_id)
    if run_shard is None:
        return {}
    run_id, shard = run_shard
    if shard is None:
        return {"run": run_id}
    return {"run": run_id, "shard": shard}
