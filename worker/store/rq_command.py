"""What `rq worker` and `rq worker-pool` were told on their command line."""

import logging

import click
from click.core import ParameterSource

from jobs.doctor.redis_server import NOT_SERVED, not_served


def called_by_rq_command() -> bool:
    """Whether `rq worker` or `rq worker-pool` is the caller, which prints any error's traceback."""
    context = click.get_current_context(silent=True)
    return context is not None and getattr(context.command.callback, "__module__", "").startswith("rq.cli")


def import_path_is_chosen() -> bool:
    """Whether somebody gave RQ's command a `--path`, which is the working directory otherwise."""
    source = click.get_current_context().get_parameter_source("path")
    return source not in (None, ParameterSource.DEFAULT)


class RedisErrorsInOneLine(logging.Filter):
    """Has RQ's command tell in one line which server does not serve whom, in place of a traceback."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Rewrite what says that Redis does not serve; let everything pass."""
        if isinstance(record.msg, NOT_SERVED) and called_by_rq_command():
            found = not_served(click.get_current_context().params.get("url") or "", record.msg)
            record.msg, record.args, record.exc_info = f"{found.found}: {found.mend}", (), None
        return True
