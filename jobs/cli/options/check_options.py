"""The options of `tokenmill submit` that say what is asked of the answers."""

from __future__ import annotations

from typing import Any

import click

from jobs.cli.options.json_option import json_value
from jobs.cli.options.submit_options import column_list
from jobs.common.display import brief
from jobs.context.checks.options import DEFAULT_MAX_ATTEMPTS


def _schema(context: click.Context, parameter: click.Parameter, text: str | None) -> Any:
    """Return a JSON schema, or that of a file."""
    if text is not None and not text.lstrip().startswith("{"):
        try:
            with open(text, encoding="utf-8-sig") as file:
                text = file.read()
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise click.BadParameter(f"{brief(text)} cannot be read: {reason}", context, parameter) from None
    return json_value(dict)(context, parameter, text)


CHECK_OPTIONS = (
    click.option(
        "--check-schema",
        metavar="JSON|FILE",
        callback=_schema,
        help="Answers must be JSON of this JSON schema; one that is not goes back with the reason.",
    ),
    click.option("--check-regex", help="The same of a pattern of Python's re, for the whole answer."),
    click.option(
        "--check-function",
        metavar="MODULE.NAME",
        help="The same of a function(row, completion) -> None or the reason, which workers must allow.",
    ),
    click.option(
        "--check-columns",
        multiple=True,
        callback=column_list,
        help="What its row has beside the prompt's columns, such as id,answer.",
    ),
    click.option(
        "--max-attempts",
        type=int,
        help=f"Answers of a row at most, the first one included; {DEFAULT_MAX_ATTEMPTS} by default.",
    ),
    click.option(
        "--continue-on-length",
        is_flag=True,
        help="Let an answer that --max-tokens has cut go on; each time is an attempt.",
    ),
    click.option(
        "--repair-template", help="Text that asks for another answer; the reason stands for {reason} in it."
    ),
)


def check_arguments(options: dict[str, Any]) -> dict[str, Any]:
    """Return them as arguments of a run. Raises UsageError for more than one check."""
    kinds = {"json": "check_schema", "regex": "check_regex", "function": "check_function"}
    given = {kind: options.get(name) for kind, name in kinds.items() if options.get(name) is not None}
    if len(given) > 1:
        raise click.UsageError("--check-schema, --check-regex and --check-function: give one of them")
    return {
        "check": given or None,
        "check_columns": options.get("check_columns"),
        "max_attempts": options.get("max_attempts"),
        "continue_on_length": options.get("continue_on_length", False),
        "repair_template": options.get("repair_template"),
    }
