"""The command-line options that describe a run, and how they become the run's arguments."""

import csv
import json
import os
from collections.abc import Callable
from functools import reduce
from typing import Any

import click

from jobs import client
from jobs.common.display import brief
from jobs.context.checks import DEFAULT_MAX_ATTEMPTS
from jobs.prompts.ways.table import WAY_OPTIONS
from jobs.runs.plans.names import OUTPUTS, SUFFIXES
from jobs.runs.plans.option_checks import LOGPROB_TYPES, PROBABILITIES, TASKS


def json_value(kind: type) -> Callable[[click.Context, click.Parameter, str | None], Any]:
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


JINJA_SUFFIXES = (".j2", ".jinja", ".jinja2")

#: Each says what to ask. A run has exactly one of them.
PROMPT_OPTIONS = (
    *("prompt_column", "messages_column", "template", "template_file", "messages_template"),
    *("prompt", "prompts"),
)


def assignments(
    context: click.Context, parameter: click.Parameter, texts: tuple[str, ...]
) -> dict[str, str] | None:
    """Return the texts of a repeatable option NAME=TEXT, by name."""
    text_of: dict[str, str] = {}
    for text in texts:
        name, is_there, value = text.partition("=")
        if not is_there or not name:
            raise click.BadParameter(f"{brief(text)}, expected {parameter.metavar}")
        if name in text_of:
            raise click.BadParameter(f"{brief(name)} is given twice")
        text_of[name] = value
    return text_of or None


def column_list(
    context: click.Context, parameter: click.Parameter, texts: tuple[str, ...]
) -> list[str] | None:
    """Return the columns of a repeatable option whose values are separated by commas."""
    if not texts:
        return None
    try:
        return [
            name for row in csv.reader(texts, strict=True, skipinitialspace=True) for name in row
        ]
    except csv.Error as error:
        raise click.BadParameter(
            f"{error}: separate them by commas, those with commas in quotation marks"
        ) from None


def label_list(
    context: click.Context, parameter: click.Parameter, text: str | None
) -> list[Any] | None:
    """Return labels from a text separated by commas, as columns are, or from a JSON list."""
    if text is None or text.lstrip().startswith("["):
        labels: list[Any] | None = json_value(list)(context, parameter, text)
        return labels
    return [label.strip() for label in column_list(context, parameter, (text,)) or ()]


def run_arguments(options: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `submit_run`. Raises UsageError for options that contradict each other."""
    prompt_flags = [
        f"--{name.replace('_', '-')}" for name in PROMPT_OPTIONS if options[name] is not None
    ]
    if len(prompt_flags) > 1:
        raise click.UsageError(
            f"{' and '.join(prompt_flags)} each say what to ask: give one of them"
        )
    # An option that was not given is None, or () if it may be repeated; an empty list was given.
    arguments: dict[str, Any] = {}
    for name, value in options.items():
        if value is not None and value != ():
            arguments[name] = list(value) if isinstance(value, tuple) else value
    arguments["input"] = arguments.pop("files")
    output = arguments["output"]
    if os.path.isfile(output):
        raise click.UsageError(
            f"OUT is the file {output}: name a new or empty folder behind the inputs"
        )
    if "output_format" in arguments and not arguments["single_file"]:
        raise click.UsageError("--output-format is that of one output file: add --single-file")
    path = arguments.pop("template_file", None)
    if path is not None:
        # Editors add a line break at the end of a file.
        arguments["template"] = _read("--template-file", path).removesuffix("\n").removesuffix("\r")
        if path.endswith(JINJA_SUFFIXES):
            arguments.setdefault("template_format", "jinja")
    prompts = arguments.pop("prompt", None)
    if prompts is not None:
        arguments["prompts"] = [
            {"name": name, "template": template} for name, template in prompts.items()
        ]
    return client.run_arguments(arguments)


def _read(option: str, path: str) -> str:
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise click.UsageError(f"{option} {path} cannot be read: {reason}") from None


def schema(context: click.Context, parameter: click.Parameter, text: str | None) -> Any:
    """Return a JSON schema, given as it is or by the name of its file."""
    if text is not None and not text.lstrip().startswith("{"):
        text = _read(parameter.opts[0], text)
    return json_value(dict)(context, parameter, text)


def response_format(context: click.Context, parameter: click.Parameter, text: str | None) -> Any:
    """Return OpenAI's response_format, given as it is or by its schema alone."""
    value = schema(context, parameter, text)
    if value is None or value.get("type") in ("text", "json_object", "json_schema"):
        return value
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": value}}


Decorator = Callable[[Any], Any]


def _option(flag: str, help: str, **how: Any) -> Decorator:
    return click.option(flag, help=help, **how)


def _switch(name: str, help: str) -> Decorator:
    return click.option(f"--{name}/--no-{name}", help=help, default=None)


#: Settings that several options share.
_TEXTS: Any = {"multiple": True}
_COLUMNS: Any = {"multiple": True, "callback": column_list}
_NAMED: Any = {"multiple": True, "callback": assignments}
_JSON_LIST = {"callback": json_value(list)}
_JSON_OBJECT = {"callback": json_value(dict)}

_FORMAT_HELP = "Format of the FILEs, where their names do not tell it; openai-batch reads OpenAI's batch files."

_INPUT = (
    click.argument("files", metavar="FILE...", nargs=-1, required=True),
    _option("--queue", "Whose workers do it.", default="bulk", show_default=True),
    _option(
        "--model-alias",
        "A model that batch files name, for the served one; * for any.",
        **_TEXTS,
        metavar="NAME",
    ),
    _option(
        "--drop-unsupported",
        "Leave out what cannot be honoured: arguments of batch files' lines, extra keys of messages.",
        is_flag=True,
    ),
    _option(
        "--inline-pictures", "Refuse lines of batch files that name a picture's file.", is_flag=True
    ),
    _option(
        "--batch-endpoint",
        "Refuse lines of batch files with another url than this.",
        metavar="PATH",
    ),
    _option("--filename-column", "Add a column of this name that holds each row's file."),
    click.option(
        "--input-format",
        "--format",
        "input_format",
        type=click.Choice(list(SUFFIXES)),
        help=_FORMAT_HELP,
    ),
    _option(
        "--encoding",
        "Of CSV and JSONL, such as cp1252 or utf-16; UTF-8 by default.",
        metavar="NAME",
    ),
    _option(
        "--delimiter",
        "Between fields of CSV, such as ';'; a comma by default.",
        metavar="CHARACTER",
    ),
    _option(
        "--decimal",
        "Before the decimals of numbers in CSV; a point by default.",
        type=click.Choice([".", ","]),
    ),
)

_PROMPT_HELP = "One of several prompts of each row, which may name earlier ones; its answer is the column NAME."

_PROMPT = (
    _option("--prompt-column", "Text to complete as it stands; by default the column `prompt`."),
    _option("--messages-column", "Chats instead: lists of role and content, or their JSON."),
    _option(
        "--image-column", "Pictures, of bytes or paths; {NAME} places them in a template.", **_TEXTS
    ),
    _option("--template", "A prompt text instead, with {column} where a row's value goes."),
    _option(
        "--template-file", "The same from a file, without its last line break.", type=click.Path()
    ),
    _option(
        "--messages-template",
        "A chat instead, as JSON: a list of messages with {column}.",
        **_JSON_LIST,
    ),
    _option("--prompt", _PROMPT_HELP, metavar="NAME=TEMPLATE", **_NAMED),
    _option("--prompts", "The same as JSON: a list of name, template and sampling.", **_JSON_LIST),
    _option(
        "--sampling", "Any sampling values, as JSON. An option wins.", **_JSON_OBJECT, default="{}"
    ),
    _option("--max-tokens", "Tokens of a completion at most; 256 by default.", type=int),
    _option("--temperature", "1 by default; 0 takes the likeliest token.", type=float),
    _option(
        "--top-p", "Only the likeliest tokens that together have this probability.", type=float
    ),
    _option("--top-k", "How many of the likeliest tokens may be drawn.", type=int),
    _option(
        "--min-p", "Only tokens with this share of the likeliest one's probability.", type=float
    ),
    _option("--seed", "The run's; each row's own follows from it and the row's number.", type=int),
    _option("--n", "Completions of each row; from 2 on the output has lists of them.", type=int),
    _option(
        "--logprobs",
        "A column of log probabilities, of each token and this many likeliest ones, 0 to 20.",
        type=int,
    ),
    _option("--prompt-logprobs", "The same of each token of the prompt.", type=int),
    _option("--presence-penalty", "Off the logit of each token there is, -2 to 2.", type=float),
    _option("--frequency-penalty", "The same, as often as the token is there.", type=float),
    _option(
        "--repetition-penalty",
        "Divides the logit of each token of prompt and completion.",
        type=float,
    ),
    _option("--logit-bias", 'What to add to logits, as JSON: {"token id": 2.5}.', **_JSON_OBJECT),
    _option("--allowed-token-ids", "No other tokens, as JSON: [1, 2].", **_JSON_LIST),
    _option("--bad-words", "A text that no completion has; may be given again.", **_TEXTS),
    _option(
        "--response-format",
        "Completions are JSON of this JSON schema, or as OpenAI's response_format says.",
        metavar="JSON|FILE",
        callback=response_format,
    ),
    _option(
        "--allow-whitespace",
        "Let such JSON have blanks and line breaks between its parts.",
        is_flag=True,
        default=None,
    ),
    _option(
        "--structured-outputs",
        'What completions must be, as JSON: {"json": SCHEMA}.',
        **_JSON_OBJECT,
    ),
    _option("--stop", "Text that ends a completion; may be given more than once.", **_TEXTS),
    _option(
        "--include-stop-str-in-output",
        "Leave the text of --stop in a completion.",
        is_flag=True,
        default=None,
    ),
    _switch(
        "skip-special-tokens",
        "Leave special tokens out of a completion's text, as is done by default, or in.",
    ),
    _switch(
        "spaces-between-special-tokens",
        "With them in, leave the spaces between two, as by default, or do not.",
    ),
    _option(
        "--truncate-prompt-tokens",
        "Read only this many last tokens of a prompt; -1: what fits.",
        type=int,
    ),
    _option(
        "--labels",
        "Give each of these labels' probability: yes,no or a JSON list.",
        callback=label_list,
    ),
    _option(
        "--probabilities",
        "Write the labels' probabilities as a struct with a field for each, or as a map, the default.",
        type=click.Choice(PROBABILITIES),
    ),
    _option(
        "--calibrate",
        "Subtract what each of --labels has behind the prompt with N/A for columns.",
        is_flag=True,
    ),
    _option(
        "--task",
        "What each row gives: an answer, its embedding, classes or relevance.",
        type=click.Choice(TASKS),
    ),
    _option("--query-column", "Of rerank; by default the column `query`."),
    _option("--document-column", "What is to answer it; by default `document`."),
    _option(
        "--dimensions",
        "Keep this many first numbers of each embedding, brought to length 1.",
        type=int,
    ),
    _option("--prompt-name", "Which of the checkpoint's prompts stands before a text to embed."),
    _option(
        "--template-format", "How templates are written.", type=click.Choice(["fields", "jinja"])
    ),
    _option(
        "--default",
        "Text for null in the template, else its row is an error.",
        metavar="COLUMN=TEXT",
        **_NAMED,
    ),
    _option(
        "--column",
        "A row's own value, as max_tokens=limit; null: the run's.",
        metavar="NAME=COLUMN",
        **_NAMED,
    ),
    _option(
        "--model", "Only a worker that serves this model, by name, path or hub id, plans the run."
    ),
)

_CHECK = (
    _option(
        "--check-schema",
        "Answers must be JSON of this JSON schema.",
        metavar="JSON|FILE",
        callback=schema,
    ),
    _option("--check-regex", "Answers must match this pattern of Python's re, whole."),
    _option(
        "--check-function",
        "A function(row, completion) -> None or the reason.",
        metavar="MODULE.NAME",
    ),
    _option("--check-columns", "What its row has beside the prompt's columns.", **_COLUMNS),
    _option(
        "--max-attempts", f"Answers of a row at most; {DEFAULT_MAX_ATTEMPTS} by default.", type=int
    ),
    _option(
        "--continue-on-length",
        "Let an answer that --max-tokens has cut go on, as an attempt.",
        is_flag=True,
    ),
    _option(
        "--repair-template",
        "Text that asks for another answer; the reason stands for {reason} in it.",
    ),
)

#: How a row gets its answer; see jobs/prompts/ways/table.py.
_WAYS = tuple(
    _option(
        f"--{name.replace('_', '-')}",
        option.help,
        multiple=option.is_repeatable,
        type=option.type,
        metavar="MODULE:FUNCTION" if name == "tool" else None,
    )
    for name, option in WAY_OPTIONS.items()
)

_OUTPUT = (
    _option("--keep", "Only these columns of the input, such as id,text.", **_COLUMNS),
    _option("--drop", "All columns of the input but these.", **_COLUMNS),
    _option(
        "--parse",
        "Give answers that are JSON a column with the types of their schema.",
        is_flag=True,
    ),
    _option("--output-prefix", "Text before the names of the columns that are added.", default=""),
    _option(
        "--logprob-type", "How log probabilities are written.", type=click.Choice(LOGPROB_TYPES)
    ),
    _option(
        "--escalate-below",
        "Ask rows whose labels have a lower margin again of a larger model.",
        type=float,
    ),
    _option(
        "--escalate-to",
        "Queue whose workers serve that; by default the run's own.",
        metavar="QUEUE",
    ),
    _option("--escalate-model", "Name of that model, where the queue has several.", metavar="NAME"),
    _option("--limit", "Score only this many rows, the first ones.", type=int),
    _option(
        "--max-errors",
        "Stop when more rows have an error: a number, or a share like 5%; by default 90%.",
    ),
    _option(
        "--deadline",
        "Begin no more rows then: a duration like 2h, or a time like 2026-12-01T08:00:00+01:00.",
        metavar="WHEN",
    ),
    _option(
        "--reuse", "Take the answers of an earlier run, by its output.", metavar="OLD", **_TEXTS
    ),
    _option("--reuse-from-any-model", "Take those of other models too.", is_flag=True),
    _option("--only-new", "Leave rows out that --reuse has answered.", is_flag=True),
    _option(
        "--reused-column",
        "Name of a column that says which row of an earlier run an answer is from.",
    ),
    _option(
        "--order",
        "Compute rows that share a beginning together; parts keep that.",
        type=click.Choice(["prefix"]),
    ),
    _option(
        "--webhook", "Gets a POST once the run ends; workers must allow its host.", metavar="URL"
    ),
    _option("--on-end", "A function that runs then; workers must allow it.", metavar="MODULE.NAME"),
    _option(
        "--single-file",
        "In the end, write all rows into one file, OUT/output.parquet.",
        is_flag=True,
    ),
    _option(
        "--output-format", "Format of that file; Parquet by default.", type=click.Choice(OUTPUTS)
    ),
    _option("--rows-per-shard", "Rows of a part.", type=int, default=1000, show_default=True),
)


def _all(options: tuple[Decorator, ...]) -> Decorator:
    return lambda command: reduce(
        lambda decorated, option: option(decorated), reversed(options), command
    )


input_options, prompt_options = _all(_INPUT), _all(_PROMPT)
check_options, output_options = _all((*_CHECK, *_WAYS)), _all(_OUTPUT)
