"""Turns values into short, printable texts for people, and into JSON."""

import datetime
import json
import math
from decimal import Decimal
from functools import partial
from typing import Any

#: The most characters of a value's repr in a message.
MAX_SHOWN_CHARS = 80
#: Stands for a value that a log does not show.
HIDDEN = "..."


def brief(value: object) -> str:
    """Return a value's repr, cut after MAX_SHOWN_CHARS."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}..."


def message_of(error: BaseException) -> str:
    """Return an error's message. If the error's class fails to make one, return a text that says so."""
    try:
        return str(error)
    except Exception as second:  # noqa: BLE001  # an error's class may have any methods
        return f"{type(error).__name__}, whose message cannot be made ({type(second).__name__})"


def shown_error(error: BaseException) -> str:
    """Return the name of an error's class and the error's message, if it has one."""
    return f"{type(error).__name__}: {message_of(error)}".removesuffix(": ")


#: The most characters of a column's or queue's name, and of a job's id in a message.
MAX_NAME_CHARS = 255
#: The most characters that are shown of a longer text, such as a path or an error.
MAX_TEXT_CHARS = 2000


def printable(text: str | bytes, allowed: str = "") -> str:
    """Escape characters that a terminal might obey or cannot show. allowed: characters that stay as they are."""
    if isinstance(text, bytes):
        text = text.decode(errors="backslashreplace")
    if text.isprintable():
        return text
    shown = ""
    for character in text:
        if character.isprintable() or character in allowed:
            shown += character
        else:
            shown += character.encode("unicode_escape").decode()
    return shown


def is_unicode(text: str) -> bool:
    """Whether a text can be written as UTF-8. Half of a surrogate pair cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def safe_name(name: str | bytes, most: int = MAX_NAME_CHARS) -> str:
    """Return a text from outside, made printable and cut after `most` characters."""
    shown = printable(name[:most])
    return shown if len(name) <= most else f"{shown}..."


def bytes_text(num_bytes: float) -> str:
    """Return an amount of memory in its largest unit, such as "3.2 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            num_decimals = 1 if unit == "GiB" else 0
            return f"{num_bytes:.{num_decimals}f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def duration_text(seconds: float) -> str:
    """Return a duration in its two largest units, such as "2 h 5 min"."""
    whole_s = max(0, round(seconds))
    for unit, unit_s, smaller_unit, smaller_s in (
        ("d", 86400, "h", 3600),
        ("h", 3600, "min", 60),
        ("min", 60, "s", 1),
    ):
        num_units, rest_s = divmod(whole_s, unit_s)
        if num_units > 0:
            return f"{num_units} {unit} {rest_s // smaller_s} {smaller_unit}"
    return f"{whole_s} s"


def plural(noun: str, number: float) -> str:
    """Return a noun as it stands after a number: "row" after 1, "rows" after any other number."""
    return noun if number == 1 else f"{noun}s"


def price_text(price: float) -> str:
    """Return an amount of any currency with two decimals. Below 1, return it with three significant digits."""
    if price >= 1 or price <= 0:
        return f"{price:,.2f}"
    num_decimals = 2 - math.floor(math.log10(price))  # 3 for 0.1 to 1, 4 for 0.01 to 0.1
    return f"{price:.{num_decimals}f}"


def utc_text(moment: float) -> str:
    """Return a time as ISO 8601 to the second, in UTC. moment: Unix seconds."""
    return datetime.datetime.fromtimestamp(moment, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def to_json(value: Any, indent: int | None = None) -> str:
    """Return a list or dict as JSON.

    A time becomes a text in ISO 8601. A decimal becomes a number if the number is exact; otherwise, a text. An infinite
    number becomes null.
    """
    dumps = partial(
        json.dumps, ensure_ascii=False, allow_nan=False, default=_replacement, indent=indent
    )
    try:
        return dumps(value)
    except ValueError:  # an infinite number
        return dumps(_without_infinite(value))


def _replacement(value: Any) -> Any:
    """Return a value that JSON can write, in place of a value that it cannot write."""
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, Decimal):
        number = float(value)
        is_exact = math.isfinite(number) and Decimal(repr(number)) == value
        return number if is_exact else str(value)
    return str(value)


def _without_infinite(value: Any) -> Any:
    """Return a value with None in place of each number that is infinite or NaN."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, list):
        return [_without_infinite(item) for item in value]
    if isinstance(value, dict):
        return {key: _without_infinite(item) for key, item in value.items()}
    return value
