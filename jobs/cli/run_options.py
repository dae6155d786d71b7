"""The command-line options that describe a run, and how they become the run's arguments."""

import csv
import json
import os
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import click

from jobs import client
from jobs.common.display import brief
from jobs.context.checks import DEFAULT_MAX_ATTEMPTS
from jobs.prompts.ways.table import WAY_OPTIONS
from jobs.runs.plans.names import OUTPUTS, SUFFIXES
from jobs.runs.plans.option_checks import LOGPROB_TYPES, PROBABILITIES, TASKS


def json_value(kind: type) -> Callable[[click.Context, click.Parameter, str | None], Any]:
    """Return a click callback for an option whose text is JSON. kind: the type of its value, `list` or `dict`."""

    def parse(context: click.Context, parameter: click.Parameter, text: str | None) -> Any:
        """Return the option's value, or None if it was not given."""
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


#: A template file with one of these suffixes is written in Jinja.
JINJA_SUFFIXES = (".j2", ".jinja", ".jinja2")

#: The options that say what to ask. A run may have only one of them.
PROMPT_OPTIONS = (
    "prompt_column",
    "messages_column",
    "template",
    "template_file",
    "messages_template",
    "prompt",
    "prompts",
)


def assignments(
    context: click.Context, parameter: click.Parameter, texts: tuple[str, ...]
) -> dict[str, str] | None:
    """Return the texts of a repeatable option NAME=TEXT, by name; None if the option was not given."""
    values: dict[str, str] = {}
    for text in texts:
        name, equals_sign, value = text.partition("=")
        if not equals_sign or not name:
            raise click.BadParameter(f"{brief(text)}, expected {parameter.metavar}")
        if name in values:
            raise click.BadParameter(f"{brief(name)} is given twice")
        values[name] = value
    return values or None


def column_list(
    context: click.Context, parameter: click.Parameter, texts: tuple[str, ...]
) -> list[str] | None:
    """Return the columns that a repeatable option lists, separated by commas; None if the option was not given."""
    if not texts:
        return None
    try:
        lists = csv.reader(texts, strict=True, skipinitialspace=True)
        return list(chain.from_iterable(lists))
    except csv.Error as error:
        raise click.BadParameter(
            f"{error}: separate the columns by commas, and put a name with a comma in quotation marks"
        ) from None


def label_list(
    context: click.Context, parameter: click.Parameter, text: str | None
) -> list[Any] | None:
    """Return labels from a JSON list, or from a text with commas between them; None if the option was not given."""
    if text is None:
        return None
    if text.lstrip().startswith("["):
        return list(json_value(list)(context, parameter, text))
    labels = column_list(context, parameter, (text,))
    assert labels is not None
    return [label.strip() for label in labels]


def run_arguments(options: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `submit_run`. Raises UsageError for options that contradict each other."""
    _check_prompt_options(options)

    # An option that was not given is None, or () if it may be repeated. An empty list is a value that was given.
    arguments: dict[str, Any] = {}
    for name, value in options.items():
        if value is not None and value != ():
            arguments[name] = list(value) if isinstance(value, tuple) else value
    arguments["input"] = arguments.pop("files")
    output = arguments["output"]
    if os.path.isfile(output):
        raise click.UsageError(
            f"OUT is the file {output}: name a new or empty folder after the inputs"
        )
    if "output_format" in arguments and not arguments["single_file"]:
        raise click.UsageError("--output-format is the format of a single file: add --single-file")

    template_path = arguments.pop("template_file", None)
    if template_path is not None:
        arguments["template"] = _template_in(template_path)
        if template_path.endswith(JINJA_SUFFIXES):
            arguments.setdefault("template_format", "jinja")
    templates_by_name = arguments.pop("prompt", None)
    if templates_by_name is not None:
        prompts = []
        for name, template in templates_by_name.items():
            prompts.append({"name": name, "template": template})
        arguments["prompts"] = prompts
    return client.run_arguments(arguments)


def _template_in(path: str) -> str:
    """Return the template in a file, without the line break that editors add at its end. Raises UsageError."""
    template = _read("--template-file", path)
    return template.removesuffix("\n").removesuffix("\r")


def _check_prompt_options(options: Mapping[str, Any]) -> None:
    """Raise UsageError if several options say what to ask."""
    flags = []
    for name in PROMPT_OPTIONS:
        if options[name] is not None:
            flags.append(f"--{name.replace('_', '-')}")
    if len(flags) > 1:
        raise click.UsageError(f"{' and '.join(flags)} each say what to ask: give one of them")


def _read(option: str, path: str) -> str:
    """Return the text of a file that an option names. Raises UsageError."""
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise click.UsageError(f"{option} {path} cannot be read: {reason}") from None


def schema(context: click.Context, parameter: click.Parameter, text: str | None) -> Any:
    """Return the JSON schema that an option names; None if it was not given. text: the schema, or its file's name."""
    if text is not None and not text.lstrip().startswith("{"):
        text = _read(parameter.opts[0], text)
    return json_value(dict)(context, parameter, text)


def response_format(context: click.Context, parameter: click.Parameter, text: str | None) -> Any:
    """Return OpenAI's response_format; None if the option was not given.

    text: the whole format, or only its schema, or the name of a file with either.
    """
    value = schema(context, parameter, text)
    if value is None or value.get("type") in ("text", "json_object", "json_schema"):
        return value
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": value}}


#: A function that adds an option or an argument to a command.
Decorator = Callable[[Any], Any]


def _option(flag: str, help: str, **settings: Any) -> Decorator:
    """Return a decorator that adds an option. settings: further arguments of click.option."""
    return click.option(flag, help=help, **settings)


def _switch(name: str, help: str) -> Decorator:
    """Return a decorator that adds an option --name/--no-name. Its value is None if neither is given."""
    return click.option(f"--{name}/--no-{name}", help=help, default=None)


#: Settings that several options share.
_TEXTS: Any = {"multiple": True}
_COLUMNS: Any = {"multiple": True, "callback": column_list}
_NAMED: Any = {"multiple": True, "callback": assignments}
_JSON_LIST = {"callback": json_value(list)}
_JSON_OBJECT = {"callback": json_value(dict)}

_FORMAT_HELP = "Format of the FILEs, where their names do not show it; openai-batch reads OpenAI's batch files."

_INPUT = (
    click.argument("files", metavar="FILE...", nargs=-1, required=True),
    _option("--queue", "Queue whose workers score the rows.", default="bulk", show_default=True),
    _option(
        "--model-alias",
        "A name in batch files that stands for the served model; * for any name.",
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
        "Encoding of CSV and JSONL files, such as cp1252 or utf-16; UTF-8 by default.",
        metavar="NAME",
    ),
    _option(
        "--delimiter",
        "Character between CSV fields, such as ';'; a comma by default.",
        metavar="CHARACTER",
    ),
    _option(
        "--decimal",
        "Decimal mark of numbers in CSV; a point by default.",
        type=click.Choice([".", ","]),
    ),
)

_PROMPT_HELP = "One of several prompts of each row. It may name earlier prompts. Its answer is the column NAME."

_PROMPT = (
    _option("--prompt-column", "Column of texts to complete as they are; `prompt` by default."),
    _option("--messages-column", "Column of chats: lists of role and content, or their JSON."),
    _option(
        "--image-column",
        "Column of pictures, as bytes or paths. {NAME} places a picture in a template.",
        **_TEXTS,
    ),
    _option("--template", "Prompt text, with {column} where a row's value goes."),
    _option(
        "--template-file",
        "File with the text of --template. Its last line break is left out.",
        type=click.Path(),
    ),
    _option("--messages-template", "Chat as JSON: a list of messages with {column}.", **_JSON_LIST),
    _option("--prompt", _PROMPT_HELP, metavar="NAME=TEMPLATE", **_NAMED),
    _option(
        "--prompts",
        "Several prompts of each row as JSON: a list of objects with name, template and sampling.",
        **_JSON_LIST,
    ),
    _option(
        "--sampling",
        "Any sampling values, as JSON. Single options override them.",
        **_JSON_OBJECT,
        default="{}",
    ),
    _option("--max-tokens", "The most tokens of a completion; 256 by default.", type=int),
    _option(
        "--temperature",
        "How random the draw of tokens is; 1 by default. 0 takes the likeliest token.",
        type=float,
    ),
    _option(
        "--top-p", "Draw only the likeliest tokens that together have this probability.", type=float
    ),
    _option("--top-k", "How many of the likeliest tokens may be drawn.", type=int),
    _option(
        "--min-p",
        "Draw only tokens with at least this share of the likeliest token's probability.",
        type=float,
    ),
    _option(
        "--seed",
        "Seed of the run. A row's seed follows from this seed and the row's number.",
        type=int,
    ),
    _option(
        "--n", "Completions of each row. From 2 on, the output has lists of completions.", type=int
    ),
    _option(
        "--logprobs",
        "Add a column of log probabilities: of each token, and of this many likeliest tokens, 0 to 20.",
        type=int,
    ),
    _option(
        "--prompt-logprobs",
        "Add a column of log probabilities as by --logprobs, for each token of the prompt.",
        type=int,
    ),
    _option(
        "--presence-penalty",
        "Subtract this from the logit of each token that was generated before, -2 to 2.",
        type=float,
    ),
    _option(
        "--frequency-penalty",
        "Subtract this from a token's logit for each time that it was generated before, -2 to 2.",
        type=float,
    ),
    _option(
        "--repetition-penalty",
        "Lower the logits of tokens in the prompt and completion by this factor.",
        type=float,
    ),
    _option("--logit-bias", 'What to add to logits, as JSON: {"token id": 2.5}.', **_JSON_OBJECT),
    _option("--allowed-token-ids", "Draw only these tokens, as JSON: [1, 2].", **_JSON_LIST),
    _option(
        "--bad-words", "Text that no completion may contain; may be given more than once.", **_TEXTS
    ),
    _option(
        "--response-format",
        "Make completions JSON of this JSON schema, or follow this response_format of OpenAI's.",
        metavar="JSON|FILE",
        callback=response_format,
    ),
    _option(
        "--allow-whitespace",
        "Let JSON completions have blanks and line breaks between their parts.",
        is_flag=True,
        default=None,
    ),
    _option(
        "--structured-outputs",
        'Form that completions must have, as JSON: {"json": SCHEMA}.',
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
        "Whether to leave special tokens out of a completion's text; by default they are left out.",
    ),
    _switch(
        "spaces-between-special-tokens",
        "Whether to put spaces between special tokens that are not left out; by default there are spaces.",
    ),
    _option(
        "--truncate-prompt-tokens",
        "Read this many tokens of a prompt, counted from its end. -1 reads as many as fit.",
        type=int,
    ),
    _option(
        "--labels",
        "Give the probability of each of these labels: yes,no or a JSON list.",
        callback=label_list,
    ),
    _option(
        "--probabilities",
        "Write the labels' probabilities as a struct with a field for each label, or as a map (default).",
        type=click.Choice(PROBABILITIES),
    ),
    _option(
        "--calibrate",
        "Correct each label's probability by its probability after the prompt with N/A for all columns.",
        is_flag=True,
    ),
    _option(
        "--task",
        "Result of each row: an answer, an embedding, classes or a relevance.",
        type=click.Choice(TASKS),
    ),
    _option("--query-column", "Column of queries, for --task rerank; `query` by default."),
    _option(
        "--document-column", "Column of documents that may answer the query; `document` by default."
    ),
    _option(
        "--dimensions",
        "Keep this many numbers of each embedding, counted from its beginning and scaled to length 1.",
        type=int,
    ),
    _option(
        "--prompt-name", "Name of the checkpoint's prompt that stands before each text to embed."
    ),
    _option(
        "--template-format", "How templates are written.", type=click.Choice(["fields", "jinja"])
    ),
    _option(
        "--default",
        "Text for null in the template. Without it, a row with null is an error.",
        metavar="COLUMN=TEXT",
        **_NAMED,
    ),
    _option(
        "--column",
        "Column of a sampling value, as max_tokens=limit. Null stands for the run's value.",
        metavar="NAME=COLUMN",
        **_NAMED,
    ),
    _option("--adapter", "LoRA adapter that answers, by its name in the workers' folder."),
    _option("--adapter-column", "Column of each row's adapter. Null stands for the run's adapter."),
    _option("--model", "Model that a worker must serve to plan the run: a name, path or hub id."),
)

_CHECK = (
    _option(
        "--check-schema",
        "Answers must be JSON of this JSON schema.",
        metavar="JSON|FILE",
        callback=schema,
    ),
    _option("--check-regex", "Whole answers must match this pattern of Python's re."),
    _option(
        "--check-function",
        "A function(row, completion) that returns None, or why the answer is not valid.",
        metavar="MODULE.NAME",
    ),
    _option(
        "--check-columns",
        "Columns that the function's row has beside the prompt's columns.",
        **_COLUMNS,
    ),
    _option(
        "--max-attempts", f"The most answers of a row; {DEFAULT_MAX_ATTEMPTS} by default.", type=int
    ),
    _option(
        "--continue-on-length",
        "Continue an answer that --max-tokens has cut. This counts as an attempt.",
        is_flag=True,
    ),
    _option(
        "--repair-template",
        "Text that asks for another answer. {reason} in it is replaced by the reason.",
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
    _option("--drop", "All columns of the input except these.", **_COLUMNS),
    _option(
        "--parse",
        "Add a column with the types of the schema for answers that are JSON.",
        is_flag=True,
    ),
    _option("--output-prefix", "Text before the names of the columns that are added.", default=""),
    _option(
        "--logprob-type", "How log probabilities are written.", type=click.Choice(LOGPROB_TYPES)
    ),
    _option(
        "--escalate-below",
        "Ask a larger model again about rows whose labels have a lower margin.",
        type=float,
    ),
    _option(
        "--escalate-to",
        "Queue whose workers serve the larger model; by default the run's queue.",
        metavar="QUEUE",
    ),
    _option(
        "--escalate-model", "Name of the larger model, if the queue has several.", metavar="NAME"
    ),
    _option("--limit", "Score only this many rows, from the first on.", type=int),
    _option(
        "--max-errors",
        "Stop when more rows than this have an error: a number, or a share like 5%; by default 90%.",
    ),
    _option(
        "--deadline",
        "Begin no row after this time: a duration like 2h, or a time like 2026-12-01T08:00:00+01:00.",
        metavar="WHEN",
    ),
    _option(
        "--priority",
        "Get this many times the workers that a run with priority 1 gets: 1, the default, to 100.",
        type=int,
    ),
    _option(
        "--reuse", "Take the answers of an earlier run, by its output.", metavar="OLD", **_TEXTS
    ),
    _option(
        "--reuse-from-any-model", "Let --reuse take the answers of other models too.", is_flag=True
    ),
    _option("--only-new", "Leave out rows that --reuse has answered.", is_flag=True),
    _option(
        "--reused-column",
        "Name of a column that says which row of an earlier run an answer is from.",
    ),
    _option(
        "--order",
        "Sort rows, so that rows with a common beginning are computed together. The parts have this order.",
        type=click.Choice(["prefix"]),
    ),
    _option(
        "--webhook",
        "URL that gets a POST once the run ends. Workers must allow its host.",
        metavar="URL",
    ),
    _option(
        "--on-end",
        "Function that is called once the run ends. Workers must allow it.",
        metavar="MODULE.NAME",
    ),
    _option(
        "--single-file",
        "In the end, write all rows into one file, OUT/output.parquet.",
        is_flag=True,
    ),
    _option(
        "--output-format",
        "Format of the single file; Parquet by default.",
        type=click.Choice(OUTPUTS),
    ),
    _option("--rows-per-shard", "Rows of a part.", type=int, default=1000, show_default=True),
)


def _all(options: tuple[Decorator, ...]) -> Decorator:
    """Return a decorator that adds all these options to a command, in this order."""

    def decorate(command: Any) -> Any:
        """Return a command with the options."""
        # Each added option stands above the earlier ones in click's help, so the first option is added last.
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


input_options = _all(_INPUT)
prompt_options = _all(_PROMPT)
check_options = _all((*_CHECK, *_WAYS))
output_options = _all(_OUTPUT)
