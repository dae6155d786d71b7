"""The options that say what a run is, for the commands that take them, and the arguments of a run that they make."""

import csv
import json
import os
from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

import click

from jobs.common.display import brief
from jobs.context.check_options import DEFAULT_MAX_ATTEMPTS
from jobs.runs.plans.formats import OUTPUTS, SUFFIXES
from jobs.runs.plans.option_checks import LOGPROB_TYPES, TASKS, TEMPLATE_FORMATS


def _json(context: click.Context, parameter: click.Parameter, text: str | None) -> Any:
    """Return the value that an option holds as JSON."""
    try:
        return None if text is None else json.loads(text)
    except (ValueError, RecursionError) as error:
        raise click.BadParameter(f"{brief(text)} is not JSON: {error}") from None


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


def label_list(context: click.Context, parameter: click.Parameter, text: str | None) -> Any:
    """Return labels apart by commas, without spaces around them; or those of a JSON list, as they are."""
    if text is None:
        return None
    if text.lstrip().startswith("["):
        return _json(context, parameter, text)
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
    return given


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
    return _json(context, parameter, text)


Decorator = Callable[[Any], Any]

#: Kinds of options.
Kind = Mapping[str, Any]
_TEXT: Kind = {}
_INT, _REAL, _FLAG, _SWITCH = {"type": int}, {"type": float}, {"is_flag": True}, {"default": None}
_TEXTS, _COLUMNS, _JSON = {"multiple": True}, {"multiple": True, "callback": column_list}, {"callback": _json}


def _named(metavar: str) -> Kind:
    return {"multiple": True, "metavar": metavar, "callback": assignments}


def _one_of(*known: str) -> Kind:
    return {"type": click.Choice(known)}


def _option(flag: str, kind: Kind, help: str, **more: Any) -> Decorator:
    return click.option(flag, help=help, **kind, **more)


_FORMAT = "Format of the FILEs, where their names do not tell it; openai-batch reads OpenAI's batch files."
_INPUT = (
    _option("--model-alias", _TEXTS, "A model that batch files name, for the served one; * for any.", metavar="NAME"),
    _option("--filename-column", _TEXT, "Add a column of this name that holds each row's file."),
    click.option("--input-format", "--format", "input_format", type=click.Choice(list(SUFFIXES)), help=_FORMAT),
)

_PROMPT = (
    _option("--prompt-column", _TEXT, "Text to complete as it stands; by default the column `prompt`."),
    _option("--messages-column", _TEXT, "Chats instead: lists of role and content, or their JSON."),
    _option("--template", _TEXT, "A prompt text instead, with {column} where a row's value goes."),
    _option("--template-file", _TEXT, "The same from a file, without its last line break.", metavar="PATH"),
    _option("--messages-template", _JSON, "A chat instead, as JSON: a list of messages with {column}."),
    _option("--prompt", _named("NAME=TEMPLATE"), "One of several prompts of each row; its answer is the column NAME."),
    _option("--prompts", _JSON, "The same as JSON: a list of name, template and sampling."),
    _option("--sampling", _JSON, "Any sampling values, as JSON. An option wins.", default="{}"),
    _option("--max-tokens", _INT, "Tokens of a completion at most; 256 by default."),
    _option("--temperature", _REAL, "1 by default; 0 takes the likeliest token."),
    _option("--top-p", _REAL, "Only the likeliest tokens that together have this probability."),
    _option("--top-k", _INT, "Only so many of the likeliest tokens."),
    _option("--min-p", _REAL, "Only tokens with this share of the likeliest one's probability."),
    _option("--seed", _INT, "The run's; each row's own follows from it and the row's number."),
    _option("--n", _INT, "Completions of each row; from 2 on the output has lists of them."),
    _option("--logprobs", _INT, "A column of log probabilities of each token and so many of the likeliest, 0 to 20."),
    _option("--prompt-logprobs", _INT, "The same of each token of the prompt."),
    _option("--presence-penalty", _REAL, "Off the logit of each token there is, -2 to 2."),
    _option("--frequency-penalty", _REAL, "The same, as often as the token is there."),
    _option("--repetition-penalty", _REAL, "Divides the logit of each token of prompt and completion."),
    _option("--logit-bias", _JSON, 'What to add to logits, as JSON: {"token id": 2.5}.'),
    _option("--allowed-token-ids", _JSON, "No other tokens, as JSON: [1, 2]."),
    _option("--bad-words", _TEXTS, "A text that no completion has; may be given again."),
    _option("--structured-outputs", _JSON, 'What completions must be, as JSON: {"json": SCHEMA}.'),
    _option("--stop", _TEXTS, "Text that ends a completion; may be given more than once."),
    _option("--include-stop-str-in-output", _FLAG | _SWITCH, "Leave the text of --stop in a completion."),
    _option("--skip-special-tokens/--no-skip-special-tokens", _SWITCH, "Special tokens of a completion: out, or in."),
    _option(
        "--spaces-between-special-tokens/--no-spaces-between-special-tokens",
        _SWITCH,
        "With them in, leave the spaces between two, as is done by default, or take them out.",
    ),
    _option("--truncate-prompt-tokens", _INT, "Read only so many last tokens of a prompt; -1: what fits."),
    _option("--labels", {"callback": label_list}, "Give each of these labels' probability: yes,no or a JSON list."),
    _option("--calibrate", _FLAG, "Subtract what each of --labels has behind the prompt with N/A for columns."),
    _option("--task", _one_of(*TASKS), "What each row gives: an answer, its embedding, its classes, or a relevance."),
    _option("--query-column", _TEXT, "Of rerank; by default the column `query`."),
    _option("--document-column", _TEXT, "What is to answer it; by default `document`."),
    _option("--dimensions", _INT, "Of each embedding the first so many numbers, brought to length 1."),
    _option("--prompt-name", _TEXT, "Which of the checkpoint's prompts stands before a text to embed."),
    _option("--template-format", _one_of(*TEMPLATE_FORMATS), "How templates are written."),
    _option("--default", _named("COLUMN=TEXT"), "Text for null of a column in the template; else the row is an error."),
    _option("--column", _named("NAME=COLUMN"), "Take each row's own value from a column; null leaves the run's."),
    _option("--model", _TEXT, "Only a worker that serves this model, by name, path or hub id, plans the run."),
)

_CHECK = (
    _option("--check-schema", {"callback": schema}, "Answers must be JSON of this JSON schema.", metavar="JSON|FILE"),
    _option("--check-regex", _TEXT, "Answers must match this pattern of Python's re, whole."),
    _option("--check-function", _TEXT, "A function(row, completion) -> None or the reason.", metavar="MODULE.NAME"),
    _option("--check-columns", _COLUMNS, "What its row has beside the prompt's columns."),
    _option("--max-attempts", _INT, f"Answers of a row at most; {DEFAULT_MAX_ATTEMPTS} by default."),
    _option("--continue-on-length", _FLAG, "Let an answer that --max-tokens has cut go on, as an attempt."),
    _option("--repair-template", _TEXT, "Text that asks for another answer; the reason stands for {reason} in it."),
)

_OUTPUT = (
    _option("--keep", _COLUMNS, "Only these columns of the input, such as id,text."),
    _option("--drop", _COLUMNS, "All columns of the input but these."),
    _option("--output-prefix", _TEXT, "Text before the names of the columns that are added.", default=""),
    _option("--logprob-type", _one_of(*LOGPROB_TYPES), "How log probabilities are written."),
    _option("--escalate-below", _REAL, "Ask rows whose labels have a lower margin again of a larger model."),
    _option("--escalate-to", _TEXT, "Queue whose workers serve that; by default the run's own.", metavar="QUEUE"),
    _option("--escalate-model", _TEXT, "Name of that model, where the queue has several.", metavar="NAME"),
    _option("--limit", _INT, "Score so many rows, the first ones, and no more."),
    _option("--max-errors", _TEXT, "Stop when more rows have an error: a number, or a share like 5%; by default 90%."),
    _option("--reuse", _TEXTS, "Take the answers of an earlier run, by its output.", metavar="OLD"),
    _option("--reuse-from-any-model", _FLAG, "Take those of other models too."),
    _option("--only-new", _FLAG, "Leave rows out that --reuse has answered."),
    _option("--reused-column", _TEXT, "Name of a column that says which row of an earlier run an answer is from."),
    _option("--order", _one_of("prefix"), "Compute rows of one beginning together, over the whole run; parts stay so."),
    _option("--webhook", _TEXT, "Gets a POST once the run ends; workers must allow its host.", metavar="URL"),
    _option("--on-end", _TEXT, "A function that runs then; workers must allow it.", metavar="MODULE.NAME"),
    _option("--single-file", _FLAG, "In the end, write all rows into one file, OUT/output.parquet."),
    _option("--output-format", _one_of(*OUTPUTS), "Format of that file; Parquet by default."),
    _option("--rows-per-shard", _INT, "Rows of a part.", default=1000, show_default=True),
)


def _all(options: tuple[Decorator, ...]) -> Decorator:
    """Return what puts options before a command, in this order."""
    return lambda command: reduce(lambda found, option: option(found), reversed(options), command)


input_options, prompt_options = _all(_INPUT), _all(_PROMPT)
check_options, output_options = _all(_CHECK), _all(_OUTPUT)
