"""The options that say what a run is, for the commands that take them."""

from collections.abc import Callable
from typing import Any

import click

from jobs.cli.options import assignments, column_list, json_value, label_list, schema
from jobs.context.check_options import DEFAULT_MAX_ATTEMPTS
from jobs.runs.plans.embedding_options import TASKS
from jobs.runs.plans.formats import OUTPUTS, SUFFIXES

Decorator = Callable[[Any], Any]

_INPUT = (
    click.option(
        "--model-alias",
        multiple=True,
        metavar="NAME",
        help="A model that lines of batch files name, in whose place the served one answers; * for any.",
    ),
    click.option("--filename-column", help="Add a column of this name that holds each row's file."),
    click.option(
        "--input-format",
        "--format",
        "input_format",
        type=click.Choice(list(SUFFIXES)),
        help="Format of the FILEs, where their names (.csv, .jsonl.gz, .arrow, ...) do not tell it; "
        "openai-batch reads OpenAI's batch files and writes OUT/output.jsonl and OUT/errors.jsonl.",
    ),
)

_PROMPT = (
    click.option("--prompt-column", help="Text to complete as it stands; by default the column `prompt`."),
    click.option("--messages-column", help="Chats instead: lists of role and content, or their JSON."),
    click.option("--template", help="A prompt text instead, with {column} where a row's value goes."),
    click.option(
        "--template-file", type=click.Path(), help="The same from a file, without its last line break."
    ),
    click.option(
        "--messages-template",
        callback=json_value(list),
        help='A chat instead, as JSON: [{"role": "user", "content": "... {column} ..."}].',
    ),
    click.option(
        "--prompt",
        metavar="NAME=TEMPLATE",
        multiple=True,
        callback=assignments,
        help="Given more than once: several prompts of each row, one after the other. Templates name columns "
        "and earlier prompts, whose answers stand there; each answer is the column NAME.",
    ),
    click.option(
        "--prompts",
        callback=json_value(list),
        help='The same as JSON, chats and own sampling values too: [{"name": "summary", "template": "...", '
        '"sampling": {"max_tokens": 64}}, ...].',
    ),
    click.option(
        "--sampling",
        callback=json_value(dict),
        default="{}",
        help='Any sampling values, as JSON: {"min_tokens": 2}. An option of its own wins.',
    ),
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
    click.option(
        "--labels",
        callback=label_list,
        help="Give the probability of each of these labels, such as yes,no, instead of generating; or as "
        'JSON: ["yes, please", " no"].',
    ),
    click.option(
        "--calibrate",
        is_flag=True,
        help="Subtract what each of --labels has behind the prompt with N/A for all columns.",
    ),
    click.option(
        "--task",
        type=click.Choice(TASKS),
        help="embed gives each row's embedding instead of a completion, as a list of float32.",
    ),
    click.option(
        "--dimensions", type=int, help="Of each embedding the first so many numbers, brought to length 1."
    ),
    click.option("--prompt-name", help="Which of the checkpoint's prompts stands before a text to embed."),
    click.option(
        "--template-format",
        type=click.Choice(["fields", "jinja"]),
        help="How templates are written: {column}, or Jinja's {{ column }}; a --template-file *.j2 is Jinja.",
    ),
    click.option(
        "--default",
        metavar="COLUMN=TEXT",
        multiple=True,
        callback=assignments,
        help="Text that stands for null of a column in the template; without one such a row is an error.",
    ),
    click.option(
        "--column",
        metavar="NAME=COLUMN",
        multiple=True,
        callback=assignments,
        help="Take each row's own value from a column, such as max_tokens=limit; null leaves the run's.",
    ),
    click.option(
        "--model", help="Only a worker that serves this model, by name, path or hub id, plans the run."
    ),
)

_CHECK = (
    click.option(
        "--check-schema",
        metavar="JSON|FILE",
        callback=schema,
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

_OUTPUT = (
    click.option(
        "--keep",
        multiple=True,
        callback=column_list,
        help="Only these columns of the input, such as id,text.",
    ),
    click.option("--drop", multiple=True, callback=column_list, help="All columns of the input but these."),
    click.option("--output-prefix", default="", help="Text before the names of the columns that are added."),
    click.option("--limit", type=int, help="Score so many rows, the first ones, and no more."),
    click.option(
        "--redo-damaged", is_flag=True, help="Remove parts that the run has not written so; redo them."
    ),
    click.option(
        "--extend", is_flag=True, help="Add what the input has gained to the run in OUT; compute only that."
    ),
    click.option(
        "--max-errors",
        help="Stop when more rows than this have an error: a number, or a share like 5%; by default 90%.",
    ),
    click.option(
        "--webhook", metavar="URL", help="Gets a POST once the run ends; workers must allow its host."
    ),
    click.option("--on-end", metavar="MODULE.NAME", help="A function that runs then; workers must allow it."),
    click.option(
        "--single-file", is_flag=True, help="In the end, write all rows into one file, OUT/output.parquet."
    ),
    click.option(
        "--output-format",
        type=click.Choice(OUTPUTS),
        help="Format of that file, whose name then ends so; Parquet by default.",
    ),
    click.option(
        "--rows-per-shard",
        type=int,
        default=1000,
        show_default=True,
        help="Rows of a part, which one worker computes and writes.",
    ),
)


def _all(options: tuple[Decorator, ...]) -> Decorator:
    """Return what puts options before a command, in this order."""

    def decorate(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


input_options, prompt_options = _all(_INPUT), _all(_PROMPT)
check_options, output_options = _all(_CHECK), _all(_OUTPUT)
