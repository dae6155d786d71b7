"""What `rq worker` and `rq worker-pool` were told on their command line."""

from __future__ import annotations

import click
from click.core import ParameterSource


def called_by_rq_command() -> bool:
    """Whether `rq worker` or `rq worker-pool` is the caller, which prints any error's traceback."""
    context = click.get_current_context(silent=True)
    return context is not None and getattr(context.command.callback, "__module__", "").startswith("rq.cli")


def import_path_is_chosen() -> bool:
    """Whether somebody gave RQ's command a `--path`, which is the working directory otherwise."""
    source = click.get_current_context().get_parameter_source("path")
    return source not in (None, ParameterSource.DEFAULT)
