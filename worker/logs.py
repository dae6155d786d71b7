"""The form of a worker's log: RQ's text or a JSON object a line; a program's own logging stays."""

import logging
import sys
from collections.abc import Mapping
from typing import Any

from rq.defaults import DEFAULT_LOGGING_DATE_FORMAT, DEFAULT_LOGGING_FORMAT
from rq.logutils import ColorizingStreamHandler, setup_loghandlers

from jobs.common.plain_log import JSON, PLAIN, VARIABLE, handle_all, is_json
from jobs.runs.plans.names import run_and_shard
from worker.errors import SettingsError

#: Loggers that RQ, and we in its way, give handlers.
_RQS = ("rq.worker", "rq.job", "rq.scheduler", "engine")


def start_log(worker: str, wanted: str, level: str | int | None, formats: tuple[str, str]) -> bool:
    """Begin to write this process' log; return whether it is JSON.

    worker: its name, which stands in each line of JSON. wanted: TOKENMILL_LOG_FORMAT. level, formats: `rq worker`'s
    options for text. Raises SettingsError if JSON is wanted and cannot be had.
    """
    has_own_text = formats != (DEFAULT_LOGGING_DATE_FORMAT, DEFAULT_LOGGING_FORMAT)
    for name in ("rq.worker", "rq.scheduler"):
        setup_loghandlers(level, *formats, name=name)
        logging.getLogger(name).addFilter(PLAIN)
    if wanted == JSON and has_own_text:
        raise SettingsError(f"{VARIABLE}=json, and --log-format or --date-format is for text: leave one of them out")
    writes_json = not has_own_text and is_json(wanted, sys.stdout) and not _is_configured()
    if writes_json:
        writes_json = _write_json(worker, is_asked_for=wanted == JSON)
    level = logging.getLogger("rq.worker").getEffectiveLevel()
    setup_loghandlers(level, *formats, name="engine")  # how a model is computed
    return writes_json


def _write_json(worker: str, is_asked_for: bool) -> bool:
    """Write JSON from now on; return whether that can be."""
    try:
        from jobs.common.json_log import JsonLine
    except ImportError as error:
        if is_asked_for:
            raise SettingsError(f"{VARIABLE}=json needs structlog ({error}): pip install structlog") from None
        logging.getLogger("rq.worker").warning("the log is text, as structlog is not installed")
        return False
    handle_all(JsonLine({"worker": worker}, _more_of), _RQS)
    return True


def _is_configured() -> bool:
    """Return whether anybody but RQ has said where logs go."""
    named = [each for name in _RQS for each in logging.getLogger(name).handlers]
    return bool(logging.getLogger().handlers) or any(type(each) is not ColorizingStreamHandler for each in named)


def _more_of(job_id: str) -> Mapping[str, Any]:
    found = zip(("run", "shard"), run_and_shard(job_id) or (), strict=False)
    return {name: each for name, each in found if each is not None}
