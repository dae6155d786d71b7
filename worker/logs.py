"""How a worker's log is written: RQ's text for people, or a JSON object a line for programs.

A program that has configured logging itself (handlers of the root logger, DICT_CONFIG of RQ's settings) keeps
what it has.
"""

import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rq.defaults import DEFAULT_LOGGING_DATE_FORMAT, DEFAULT_LOGGING_FORMAT
from rq.logutils import ColorizingStreamHandler, setup_loghandlers

from jobs.common.plain_log import AUTO, JSON, VARIABLE, handle_all, is_json, keep_plain
from jobs.runs.plans.names import run_and_shard
from worker.errors import SettingsError

#: Loggers that RQ, and we in its way, give handlers.
_RQS = ("rq.worker", "rq.job", "rq.scheduler", "engine")


@dataclass(frozen=True)
class LogStyle:
    """What an operator asks of the log. wanted: of TOKENMILL_LOG_FORMAT. The rest are `rq worker`'s flags."""

    wanted: str = AUTO
    level: str | int | None = None
    date_format: str = DEFAULT_LOGGING_DATE_FORMAT
    log_format: str = DEFAULT_LOGGING_FORMAT

    @property
    def has_own_text(self) -> bool:
        """Whether the flags say how a line of text looks: then it is one."""
        return (self.date_format, self.log_format) != (DEFAULT_LOGGING_DATE_FORMAT, DEFAULT_LOGGING_FORMAT)

    def start(self, worker: str, logger: str = "rq.worker") -> bool:
        """Let the log of this process be written so; return whether it is JSON.

        worker: its name, which stands in each line of JSON. logger: whose level the flags set.
        Raises SettingsError where JSON is asked for that the flags contradict, or that cannot be had.
        """
        setup_loghandlers(self.level, self.date_format, self.log_format, name=logger)
        keep_plain(logging.getLogger(logger))
        if self.wanted == JSON and self.has_own_text:
            raise SettingsError(
                f"{VARIABLE}=json, and --log-format or --date-format is for text: leave one of them out"
            )
        writes_json = not self.has_own_text and is_json(self.wanted, sys.stdout) and not _is_configured()
        if writes_json:
            writes_json = self._write_json(worker)
        level = logging.getLogger(logger).getEffectiveLevel()
        setup_loghandlers(level, self.date_format, self.log_format, name="engine")  # how a model is computed
        return writes_json

    def _write_json(self, worker: str) -> bool:
        """Return whether that can be."""
        try:
            from jobs.common.json_log import JsonLine
        except ImportError as error:
            if self.wanted == JSON:
                raise SettingsError(
                    f"{VARIABLE}=json needs structlog ({error}): pip install structlog"
                ) from None
            logging.getLogger("rq.worker").warning("the log is text, as structlog is not installed")
            return False
        handle_all(JsonLine({"worker": worker}, _more_of), _RQS)
        return True


def _is_configured() -> bool:
    """Whether somebody else than RQ has said where logs go."""
    named = [each for name in _RQS for each in logging.getLogger(name).handlers]
    return bool(logging.getLogger().handlers) or any(
        type(each) is not ColorizingStreamHandler for each in named
    )


def _more_of(job_id: str) -> Mapping[str, Any]:
    found = run_and_shard(job_id)
    return {} if found is None else {"run": found[0], "shard": found[1]}
