"""Reads values from Redis, where producers may write anything. A value that cannot be right counts as missing."""

import json
import zlib
from contextlib import suppress
from datetime import datetime
from typing import Any

#: A larger JSON object is not read. Ours are far smaller.
MAX_OBJECT_BYTES = 1 << 20
#: Numbers from here on cannot be right. Ours have at most 63 bits.
_TOO_LARGE = 1 << 63


def text(raw: bytes) -> str:
    """Return stored bytes as a text. Bytes that are not UTF-8 become escapes, which occur in no name of ours."""
    return raw.decode(errors="backslashreplace")


def unpack_at_most(packed: bytes, most: int) -> bytes | None:
    """Unpack bytes that zlib has compressed. Return None if the unpacked bytes are more than `most`.

    At most `most` + 1 bytes are unpacked. Bytes that zlib cannot unpack are returned unchanged, as RQ does.
    """
    inflater = zlib.decompressobj()
    content = packed
    with suppress(zlib.error):
        inflated = inflater.decompress(packed, most + 1)
        is_whole = inflater.eof
        is_too_long = len(inflated) > most
        if is_whole or is_too_long:  # compressed bytes that were cut off are returned unchanged too
            content = inflated
    return content if len(content) <= most else None


def json_object(raw: object) -> dict[str, Any]:
    """Read a stored JSON object. Return {} for anything else, such as None or an error of Redis."""
    if not isinstance(raw, bytes) or len(raw) > MAX_OBJECT_BYTES:
        return {}
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def count(value: object) -> int | None:
    """Read a stored count: an int of at most 63 bits, or a text of at most 18 digits. Return None for anything else."""
    if isinstance(value, str):
        has_digits_only = value.isascii() and value.isdigit()
        is_short = len(value) <= 18
        return int(value) if has_digits_only and is_short else None
    if type(value) is int and 0 <= value < _TOO_LARGE:
        return value
    return None


def seconds(text: str | None) -> float | None:
    """Read a text that is a number of seconds. Return None for anything else, such as a negative number or inf."""
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if 0 <= value < _TOO_LARGE else None


def moment(raw: object) -> float | None:
    """Read a date that RQ wrote. Return its Unix seconds, or None for anything else."""
    if not isinstance(raw, bytes):
        return None
    try:
        value = datetime.fromisoformat(text(raw)).timestamp()
    except (ValueError, OverflowError, OSError):
        return None
    return value if value >= 0 else None
