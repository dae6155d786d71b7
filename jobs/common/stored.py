"""Reads values out of Redis, where producers may write anything: what cannot be right counts as missing."""

import json
import zlib
from contextlib import suppress
from datetime import datetime
from typing import Any

#: Ours are far smaller; a larger one is not read.
MAX_OBJECT_BYTES = 1 << 20


def text(raw: bytes) -> str:
    """Return a stored name; bytes that are no UTF-8 become escapes, which no name of ours holds."""
    return raw.decode(errors="backslashreplace")


def unpacked(packed: bytes, most: int) -> bytes | None:
    """Return what RQ packs, or takes as it stands; None beyond `most` bytes, and no more is unpacked."""
    inflater, found = zlib.decompressobj(), packed
    with suppress(zlib.error):
        inflated = inflater.decompress(packed, most + 1)
        if inflater.eof or len(inflated) > most:  # else RQ takes it as it stands
            found = inflated
    return found if len(found) <= most else None


def json_object(raw: object) -> dict[str, Any]:
    """Return a stored JSON object, {} for anything else: none, another type, an error of Redis."""
    if not isinstance(raw, bytes) or len(raw) > MAX_OBJECT_BYTES:
        return {}
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def count(value: object) -> int | None:
    """Return a stored count, an int or its digits; None for anything else."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 19:
        return int(value)
    return value if type(value) is int and 0 <= value < 1 << 63 else None


def seconds(text: str | None) -> float | None:
    """Return a stored time; None for what is none."""
    try:
        found = float(text or "")
    except ValueError:
        return None
    return found if 0 <= found < 1 << 63 else None


def moment(raw: object) -> float | None:
    """Return a time as RQ writes it in Unix seconds; None for what is none."""
    try:
        found = datetime.fromisoformat(text(raw) if isinstance(raw, bytes) else "").timestamp()
    except (ValueError, OverflowError, OSError):
        return None
    return found if found >= 0 else None
