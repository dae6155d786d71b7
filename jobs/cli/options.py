"""Parses options of the command line, and makes the arguments of a run from them."""

import csv
import json
import os
from collections.abc import Callable
from typing import Any

import click

from jobs import client
from jobs.common.display import brief


def json_value(kind: type) -> Callable[[click.Context, click.Parameter, str | None], Any]:
    """Return the callback of an option that holds JSON of one type."""

    def parse(context: click.Context, parameter: click.Parameter, text: str | None) -> Any:
        if text is None:
            return None
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise click.BadParameter(f"{brief(text)} is not JSON: {error}") from None
        if not isinstance(value, kind):
            raise click.BadParameter(f"{brief(text)} is JSON, but no {kind.__name__}")
        return value

    return parse


#: Of a file that holds a Jinja template.
JINJA_SUFFIXES = (".j2", ".jinja", ".jinja2")

#: Each says what to ask; a run has one of them.
PROMPT_OPTIONS = (
    *("prompt_column", "messages_column", "template", "template_file", "messages_template"),
    *("prompt", "prompts"),
)


def assignments(context: click.Context, parameter: click.Parameter, texts: tuple[str, ...]) -> dict[str, str] | None:
    """Return what an option of the form NAME=TEXT, given more than once, says of each name."""
    found: dict[str, str] = {}
    for text in texts:
        name, is_there, value = text.partition("=")
        if not is_there or not name:
            raise click.BadParameter(f"{brief(text)}, expected {parameter.metavar}")
        if name in found:
            raise click.BadParameter(f"{brief(name)} is given twice")
        found[name] = value
    return found or None


def column_list(context: click.Context, parameter: click.Parameter, texts: tuple[str, ...]) -> list[str] | None:
    """Return the columns of an option that takes several, apart by commas and given more than once."""
    if not texts:
        return None
    try:
        return [name for row in csv.reader(texts, strict=True) for name in row]
    except csv.Error as error:
        raise click.BadParameter(f"no list of columns: {error}") from None


def label_list(context: click.Context, parameter: click.Parameter, text: str | None) -> list[Any] | None:
    """Return labels apart by commas, without spaces around them; or those of a JSON list, as they are."""
    if text is None:
        return None
    if text.lstrip().startswith("["):
        found = json_value(list)(context, parameter, text)
        assert isinstance(found, list)
        return found
    labels = [label.strip() for label in text.split(",")]
    if quoted := next((label for label in labels if label.startswith('"')), None):
        raise click.BadParameter(
            f"{brief(quoted)} begins with a quotation mark, which would be part of the label: write labels "
            'with commas or quotation marks as JSON, such as ["yes, please", "no"]'
        )
    return labels


def run_arguments(options: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `submit_run`. Raises UsageError for options that contradict each other."""
    asked = [f"--{name.replace('_', '-')}" for name in PROMPT_OPTIONS if options[name] is not None]
    if len(asked) > 1:
        raise click.UsageError(f"{' and '.join(asked)} each say what to ask: give one of them")
    # What is not given is None, and () of an option that may be repeated; an empty list was given.
    said = {name: value for name, value in options.items() if value is not None and value != ()}
    given: dict[str, Any] = {name: list(v) if isinstance(v, tuple) else v for name, v in said.items()}
    given["input"] = given.pop("files")
    if os.path.isfile(output := given["output"]):
        raise click.UsageError(f"OUT is the file {output}: name a new or empty folder behind the inputs")
    if "output_format" in given and not given["single_file"]:
        raise click.UsageError("--output-format is that of one output file: add --single-file")
    if (path := given.pop("template_file", None)) is not None:
        given["template"] = _read("--template-file", path).removesuffix("\n").removesuffix("\r")  # which editors add
        if path.endswith(JINJA_SUFFIXES):
            given.setdefault("template_format", "jinja")
    if (prompts := given.pop("prompt", None)) is not None:
        given["prompts"] = [{"name": name, "template": template} for name, template in prompts.items()]
    return client.run_arguments(given)


def _read(option: str, path: str) -> str:
    """Return a file's text without a byte order mark."""
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise click.UsageError(f"{option} {path} cannot be read: {reason}") from None


def schema(context: click.Context, parameter: click.Parameter, text: str | None) -> Any:
    """Return a JSON schema, or that of a file."""
    if text is not None and not text.lstrip().startswith("{"):
        text = _read("--check-schema", text)
    return json_value(dict)(context, parameter, text)
