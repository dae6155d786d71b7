"""Checks single values of untrusted arguments. Each check raises InvalidJob, which names the argument."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from jobs.common.display import MAX_NAME_CHARS, MAX_SHOWN_CHARS, brief, is_unicode
from jobs.errors import InvalidJob, InvalidValue, check_limit, wrong_value_error


def truth(name: str, value: Any) -> bool:
    """Return a truth value; None counts as False."""
    if value is not None and not isinstance(value, bool):
        raise wrong_value_error(name, value, f"true or false: write {name}:=true")
    return bool(value)


def whole_number(name: str, value: Any, most: int | None = None) -> int:
    """Return an integer that is at least 1. most: the largest integer that is allowed; None for no limit."""
    if isinstance(value, str):
        raise InvalidValue(
            f"{name} arrived as the text {{}}: write {name}:={{}}",
            brief(value),
            value[:MAX_SHOWN_CHARS],
        )
    is_too_large = most is not None and type(value) is int and value > most
    if type(value) is not int or value < 1 or is_too_large:
        expected = "an integer from 1 on" if most is None else f"an integer from 1 to {most}"
        raise wrong_value_error(name, value, expected)
    return value


def one_of(name: str, value: Any, known: Sequence[str]) -> str:
    """Return a value that is one of the known words."""
    if value not in known:
        raise wrong_value_error(name, value, " or ".join(map(repr, known)))
    return str(value)


def checked_list(name: str, value: Any, kind_of_list: str, least: int, most: int) -> Sequence[Any]:
    """Return a list as it is, if it has `least` to `most` values.

    kind_of_list: what is expected, such as "a list of texts"; for the error about a value that is no list.
    """
    if not isinstance(value, list | tuple):
        raise wrong_value_error(name, value, kind_of_list)
    if not least <= len(value) <= most:
        raise InvalidJob(f"{name} holds {len(value)} values, expected {least} to {most}")
    return value


def some_text(name: str, value: Any, most: int) -> str:
    """Return a text of 1 to `most` characters that is valid Unicode."""
    if not isinstance(value, str) or not 0 < len(value) <= most:
        raise wrong_value_error(name, value, f"a text of 1 to {most} characters")
    if not is_unicode(value):
        raise InvalidJob(f"{name} is not valid Unicode: it holds half of a surrogate pair")
    return value


column_name = partial(some_text, most=MAX_NAME_CHARS)


def share(name: str, value: Any) -> float:
    """Return a number above 0 and at most 1. Raises InvalidJob."""
    if type(value) not in (int, float) or not 0 < value <= 1:
        raise wrong_value_error(name, value, "a number above 0, at most 1")
    return float(value)


def check_shard(count: int, noun: str, rows: int, most: int) -> None:
    """Raise InvalidJob if a shard would hold more than `most` values.

    count: how many values each row has. noun: what the values are, for the error. rows: how many rows a shard has.
    """
    check_limit(
        count * rows,
        most,
        f"{count} {noun} make {{}} in a shard of {rows} rows",
        "give fewer rows_per_shard",
    )
