"""The options of `tokenmill submit` that are sampling values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from jobs.cli.options.json_option import json_value
from jobs.client import SAMPLING_NAMES

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
