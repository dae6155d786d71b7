"""The options of `tokenmill submit`, and the arguments of a run that they make."""

import csv
import json
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

from jobs.client import SAMPLING_NAMES
from jobs.common.display import brief
from jobs.context.check_options import DEFAULT_MAX_ATTEMPTS
from jobs.runs.plans.formats import PARQUET
from jobs.runs.plans.spec import DEFAULT_PROMPT_COLUMN


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


Command = TypeVar("Command", bound=Callable[..., Any])

_OPTIONS = (
    click.option("--max-tokens", type=int, help="Tokens of a completion at most; 256 by default."),
    click.option("--temperature", type=float, help="1 by default; 0 takes the likeliest token."),
    click.option(
        "--top-p", type=float, help="Only the likeliest tokens that together have this probability."
    ),
    click.option("--top-k", type=int, help="Only so many of the likeliest tokens."),
    click.option(
        "--min-p", type=float, help="Only tokens with this share of the likeliest one's probability."
    ),
    click.option("--seed", type=int, help="The run's; each row's own follows from it and the row's number."),
    click.option("--n", type=int, help="Completions of each row; from 2 on the output has lists of them."),
    click.option("--presence-penalty", type=float, help="Off the logit of each token there is, -2 to 2."),
    click.option("--frequency-penalty", type=float, help="The same, as often as the token is there."),
    click.option(
        "--repetition-penalty",
        type=float,
        help="Divides the logit of each token of prompt and completion; 1 changes nothing.",
    ),
    click.option(
        "--logit-bias", callback=json_value(dict), help='What to add to logits, as JSON: {"token id": 2.5}.'
    ),
    click.option("--allowed-token-ids", callback=json_value(list), help="No other tokens, as JSON: [1, 2]."),
    click.option("--bad-words", multiple=True, help="A text that no completion has; may be given again."),
    click.option(
        "--structured-outputs",
        callback=json_value(dict),
        help='What each completion must be, as JSON: {"json": SCHEMA}, "json_object", "regex", "choice" or '
        '"grammar".',
    ),
    click.option("--stop", multiple=True, help="Text that ends a completion; may be given more than once."),
    click.option(
        "--include-stop-str-in-output",
        is_flag=True,
        default=None,
        help="Leave the text of --stop that ends a completion at its end.",
    ),
    click.option(
        "--skip-special-tokens/--no-skip-special-tokens",
        default=None,
        help="Leave special tokens out of a completion's text, as is done by default, or in.",
    ),
    click.option(
        "--spaces-between-special-tokens/--no-spaces-between-special-tokens",
        default=None,
        help="With them in, leave the spaces between two, as is done by default, or take them out.",
    ),
    click.option(
        "--truncate-prompt-tokens", type=int, help="Read only so many last tokens of a prompt; -1: what fits."
    ),
)


def sampling_options(command: Command) -> Command:
    """Give a command an option for each common sampling value, and one for any."""
    for option in reversed(_OPTIONS):
        command = option(command)
    any_values = click.option(
        "--sampling",
        callback=json_value(dict),
        default="{}",
        help='Any sampling values, as JSON: {"min_tokens": 2}. An option of its own wins.',
    )
    return any_values(command)


def sampling_of(options: dict[str, Any]) -> dict[str, Any]:
    """Return the sampling values among a command's options; one of its own goes before `--sampling`'s."""
    given = {name: options[name] for name in SAMPLING_NAMES if options[name] not in (None, ())}
    lists = {name: list(value) for name, value in given.items() if isinstance(value, tuple)}
    return {**options["sampling"], **given, **lists}


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
