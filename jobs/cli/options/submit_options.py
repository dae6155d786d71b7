"""The options of `tokenmill submit` as the arguments of a run."""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from typing import Any

import click

from jobs.cli.options.json_option import json_value
from jobs.cli.options.sampling_options import sampling_of
from jobs.common.display import brief
from jobs.runs.plans.formats import PARQUET
from jobs.runs.plans.spec import DEFAULT_PROMPT_COLUMN

#: What the output has.
OUTPUT_OPTIONS = ("keep", "drop", "output_prefix", "limit")

#: What embeddings are to be.
EMBEDDING_OPTIONS = ("task", "dimensions", "prompt_name")

#: Of a file that holds a Jinja template.
JINJA_SUFFIXES = (".j2", ".jinja", ".jinja2")

#: Each says what to ask; a run has one of them.
PROMPT_OPTIONS = (
    *("prompt_column", "messages_column", "template", "template_file", "messages_template"),
    *("prompt", "prompts"),
)


def assignments(
    context: click.Context, parameter: click.Parameter, texts: tuple[str, ...]
) -> dict[str, str] | None:
    """Return what an option of the form NAME=TEXT, given more than once, says of each name."""
    found: dict[str, str] = {}
    for text in texts:
        name, is_there, value = text.partition("=")
        if not is_there or not name:
            raise click.BadParameter(f"{brief(text)}, expected {parameter.metavar}", context, parameter)
        if name in found:
            raise click.BadParameter(f"{brief(name)} is given twice", context, parameter)
        found[name] = value
    return found or None


def column_list(
    context: click.Context, parameter: click.Parameter, texts: tuple[str, ...]
) -> list[str] | None:
    """Return the columns of an option that takes several, apart by commas and given more than once."""
    if not texts:
        return None
    try:
        return [name for row in csv.reader(texts, strict=True) for name in row]
    except csv.Error as error:
        raise click.BadParameter(f"no list of columns: {error}", context, parameter) from None


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
            'with commas or quotation marks as JSON, such as ["yes, please", "no"]',
            context,
            parameter,
        )
    return labels


def run_arguments(options: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `submit_run`. Raises UsageError for options that contradict each other."""
    given = [name for name in PROMPT_OPTIONS if options[name] is not None]
    if len(given) > 1:
        names = " and ".join("--" + name.replace("_", "-") for name in given)
        raise click.UsageError(f"{names} each say what to ask: give one of them")
    template = options["template"]
    if options["template_file"] is not None:
        template = _read_template(options["template_file"])
    prompt_column = options["prompt_column"]
    return {
        "input": _inputs(options["files"], options["output"]),
        "output": options["output"],
        "prompt_column": DEFAULT_PROMPT_COLUMN if prompt_column is None else prompt_column,
        "messages_column": options["messages_column"],
        "template": options["messages_template"] if template is None else template,
        "sampling": sampling_of(options),
        "rows_per_shard": options["rows_per_shard"],
        "input_format": options["input_format"],
        "single_file": _single_file(options),
        "model": options["model"],
        "model_alias": list(options["model_alias"]) or None,
        "filename_column": options["filename_column"],
        "redo_damaged": options["redo_damaged"],
        "extend": options["extend"],
        "max_errors": options["max_errors"],
        "webhook": options["webhook"],
        "on_end": options["on_end"],
        **{name: options[name] for name in OUTPUT_OPTIONS},
        "sampling_columns": options["column"],
        "defaults": options["default"],
        "template_format": _template_format(options),
        "prompts": _prompts(options),
        "labels": options["labels"],
        "calibrate": options["calibrate"],
        **{name: options[name] for name in EMBEDDING_OPTIONS},
    }


def _prompts(options: dict[str, Any]) -> list[dict[str, Any]] | None:
    if options["prompt"] is None:
        return options["prompts"]  # type: ignore[no-any-return]
    return [{"name": name, "template": template} for name, template in options["prompt"].items()]


def _single_file(options: dict[str, Any]) -> str | None:
    if options["output_format"] is not None and not options["single_file"]:
        raise click.UsageError("--output-format is that of one output file: add --single-file")
    return options["output_format"] or PARQUET if options["single_file"] else None


def _inputs(files: Sequence[str], output: str) -> list[str]:
    if os.path.isfile(output):
        raise click.UsageError(f"OUT is the file {output}: name a new or empty folder behind the inputs")
    return list(files)


def _template_format(options: dict[str, Any]) -> str | None:
    """Return how the template is written; a file's name says so too."""
    name = options["template_file"] or ""
    return options["template_format"] or ("jinja" if name.endswith(JINJA_SUFFIXES) else None)


def _read_template(path: str) -> str:
    """Return a file's text without what editors add: a byte order mark, and the last line break."""
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise click.UsageError(f"--template-file {path} cannot be read: {reason}") from None
    return text.removesuffix("\n").removesuffix("\r")
