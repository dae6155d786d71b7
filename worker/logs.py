"""Sets the form of a worker's log, and logs a lasting trouble once in place of again and again.

The log is RQ's text, or a JSON object for each line.
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


#: Seconds without a trouble after which it counts as over.
OVER_S = 20.0


class LastingTrouble:
    """Logs each kind of a trouble once while the trouble lasts, and once that it is over. For any thread.

    A trouble that comes back within OVER_S counts as lasting. So a trouble that comes and goes does not fill the log.
    """

    def __init__(
        self,
        log: logging.Logger,
        over: str,
        level: int = logging.ERROR,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """over: the words of the line at the trouble's end. level: the level of the line at its beginning."""
        self._log = log
        self._over = over
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
        """Whether the trouble was met within the last OVER_S seconds."""
        return self._began_at is not None and self._clock() - self._last_at < OVER_S

    def met(self, kind: str, message: str, *args: object) -> None:
        """Note the trouble. The message is logged if it is the first of its kind since the trouble began."""
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

    def passed(self) -> None:
        """Note that all is well at this moment."""
        with self._lock:
            self._end_if_over()

    def ended(self) -> None:
        """Note a proof that the trouble is over. That is logged at once, unless the trouble came back within OVER_S."""
        with self._lock:
            if self._began_at is None or self._comes_and_goes:
                self._end_if_over()
            else:
                self._end()

    def _end_if_over(self) -> None:
        """Log that the trouble is over, if it was not met for OVER_S."""
        if self._began_at is not None and self._clock() - self._last_at >= OVER_S:
            self._end()

    def _end(self) -> None:
        """Log that the trouble is over."""
        assert self._began_at is not None
        lasted_s = self._last_at - self._began_at
        self._log.info("%s (seen %d times in %.0f s)", self._over, self._num_times, lasted_s)
        self._ended_at = self._clock()
        self._began_at = None
        self._num_times = 0
        self._kinds_logged.clear()


def start_log(worker: str, wanted: str, level: str | int | None, formats: tuple[str, str]) -> bool:
    """Begin to write this process' log; return whether it is JSON.

    worker: the worker's name, which is in each line of JSON. wanted: TOKENMILL_LOG_FORMAT. level, formats: the options
    of `rq worker` for text. If the program has set up logging itself, nothing is changed. Raises SettingsError if JSON
    is wanted but not possible.
    """
    for name in ("rq.worker", "rq.scheduler"):
        setup_loghandlers(level, *formats, name=name)
        logging.getLogger(name).addFilter(PLAIN)

    has_own_text = formats != (DEFAULT_LOGGING_DATE_FORMAT, DEFAULT_LOGGING_FORMAT)
    if wanted == JSON and has_own_text:
        raise SettingsError(
            f"{VARIABLE}=json, and --log-format or --date-format is for text: leave one of them out"
        )
    writes_json = False
    if not has_own_text and is_json(wanted, sys.stdout) and not _is_configured():
        writes_json = _write_json(worker, is_asked_for=wanted == JSON)

    effective_level = logging.getLogger("rq.worker").getEffectiveLevel()
    # RQ adds no handler for the engine, which logs how it computes a model.
    setup_loghandlers(effective_level, *formats, name="engine")
    return writes_json


def _write_json(worker: str, is_asked_for: bool) -> bool:
    """Write JSON from now on. Without structlog it returns False, or raises SettingsError if JSON was asked for."""
    try:
        from jobs.common.json_log import JsonLine
    except ImportError as error:
        if is_asked_for:
            raise SettingsError(
                f"{VARIABLE}=json needs structlog ({error}): pip install structlog"
            ) from None
        logging.getLogger("rq.worker").warning("the log is text, as structlog is not installed")
        return False
    handle_all(JsonLine({"worker": worker}, _run_fields), _LOGGERS)
    return True


def _is_configured() -> bool:
    """Return whether anybody but RQ has set handlers."""
    if logging.getLogger().handlers:
        return True
    for name in _LOGGERS:
        for handler in logging.getLogger(name).handlers:
            if type(handler) is not ColorizingStreamHandler:  # the class of RQ's handlers
                return True
    return False


def _run_fields(job_id: str) -> Mapping[str, Any]:
    """Return the run and the shard of a job, if it has them."""
    run_shard = run_and_shard(job_id)
    if run_shard is None:
        return {}
    run_id, shard = run_shard
    if shard is None:
        return {"run": run_id}
    return {"run": run_id, "shard": shard}
