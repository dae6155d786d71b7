"""An option of the command line that holds JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import click

from jobs.common.display import brief


def json_value(kind: type) -> Callable[[click.Context, click.Parameter, str | None], Any]:
    """Return the callback of an option that holds JSON of one type."""

    def parse(context: click.Context, parameter: click.Parameter, text: str | None) -> Any:
        if text is None:
            return None
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise click.BadParameter(f"{brief(text)} is not JSON: {error}", context, parameter) from None
        if not isinstance(value, kind):
            raise click.BadParameter(f"{brief(text)} is JSON, but no {kind.__name__}", context, parameter)
        return value

    return parse
