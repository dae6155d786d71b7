"""Reads the arguments that say how an input's text is written: encoding, CSV's delimiter and decimal mark."""

import codecs
from collections.abc import Mapping
from typing import Any

from jobs.errors import InvalidJob, wrong_value_error
from jobs.runs.plans.names import HEADED, LINES

#: The arguments of a run that say how its input's text is written, in the order in which they are shown.
DIALECT = ("encoding", "delimiter", "decimal")
_TAB = "\t"
#: How people write a tab where they cannot type one.
_TABS = ("\\t", "tab")


def parse_encoding(name: str, value: Any) -> str | None:
    """Return Python's name of a text encoding; None if `value` is None. Raises InvalidValue."""
    if value is None:
        return None
    try:
        codec = codecs.lookup(value)
    except (LookupError, TypeError, ValueError):
        codec = None
    if codec is None or not codec._is_text_encoding or codec.incrementaldecoder is None:
        raise wrong_value_error(
            name, value, "an encoding of text that Python knows, such as utf-8, cp1252 or utf-16"
        )
    return codec.name


def parse_delimiter(name: str, value: Any) -> str | None:
    """Return the character between two CSV fields; None for the default. Raises InvalidValue."""
    if value is None:
        return None
    if value in _TABS:
        return _TAB
    is_character = isinstance(value, str) and len(value) == 1
    if not is_character or not _may_separate(value):
        raise wrong_value_error(
            name, value, "one character that stands between fields, such as ; or | or \\t"
        )
    return str(value)


def _may_separate(character: str) -> bool:
    """Whether a character can stand between CSV fields."""
    if character == '"' or character.isalnum():
        return False
    return character == _TAB or character.isprintable()


def parse_decimal(name: str, value: Any) -> str | None:
    """Return the decimal mark in a file's numbers: "," or None, which means the point. Raises InvalidValue."""
    if value in (None, "."):
        return None
    if value != ",":
        raise wrong_value_error(name, value, "the point or the comma as the decimal mark, . or ,")
    return ","


def check_dialect(dialect: Mapping[str, str], input_format: str) -> None:
    """Raise InvalidJob for an argument that files of this format do not take. dialect: see RunSpec.dialect."""
    for name in dialect:
        formats = LINES if name == "encoding" else HEADED  # HEADED is CSV and TSV
        if input_format not in formats:
            raise InvalidJob(
                f"{name} is for {', '.join(sorted(formats))} files, and the input is {input_format}: leave it out, or "
                "say with input_format (--input-format) what else the input is"
            )
