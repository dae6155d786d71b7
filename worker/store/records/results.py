"""The value or error of an ended job, in RQ's form and within bounds."""

import io
import json
import traceback
from dataclasses import dataclass
from typing import Any

from rq.defaults import UNSERIALIZABLE_RETURN_VALUE_PAYLOAD

from jobs.errors import ResultTooLarge

MAX_TRACEBACK_CHARS = 1 << 16
_HEAD_CHARS = 1 << 14
"""How much of the beginning stays of a longer one; the end says most."""

_MAX_FRAMES = 30

_SMALL_BYTES, _SMALL_VALUES = 1 << 18, 5000
"""A value of no more is packed in less than a few milliseconds."""


@dataclass(frozen=True)
class Raised:
    """User code's error, with its traceback, made in its thread: an error's methods are user code too."""

    error: BaseException
    text: str


def printable(error: BaseException) -> str:
    """Return an error's traceback in characters that Redis can take, cut to a length."""
    try:
        text = "".join(traceback.format_exception(error))
    except Exception:  # noqa: BLE001  # an error's class may have any methods
        text = f"{type(error).__module__}.{type(error).__qualname__}: its traceback cannot be shown\n"
    left_out = len(text) - MAX_TRACEBACK_CHARS
    if left_out > 0:
        head, tail = text[:_HEAD_CHARS], text[_HEAD_CHARS + left_out :]
        text = f"{head}\n[{left_out} characters are left out here]\n{tail}"
    return text.encode("utf-8", "backslashreplace").decode()


def frames_of(error: BaseException) -> str:
    """Return where an error was raised, innermost call first. Its message is left out, as it may quote a prompt."""
    frames = traceback.extract_tb(error.__traceback__)[-_MAX_FRAMES:]
    return ", ".join(f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in reversed(frames))


def is_small(value: Any) -> bool:
    """Whether a value of our own code takes no time to pack."""
    least_bytes, num_values = _measure(value, _SMALL_BYTES)
    return least_bytes <= _SMALL_BYTES and num_values <= _SMALL_VALUES


def pack(value: Any, most: int, known_small: bool = False) -> bytes | None:
    """Return a value's JSON, None for None, and RQ's placeholder for a value without JSON.

    known_small: by `is_small`, so that nothing is measured. Raises ResultTooLarge beyond `most` bytes. Packing a large
    value lets other threads run.
    """
    if value is None:
        return None
    try:
        least_bytes, num_values = (0, 0) if known_small else _measure(value, most)
        if least_bytes > most:
            raise ResultTooLarge(most)
        text = json.dumps(value) if num_values <= _SMALL_VALUES else _dump_in_pieces(value, most)
    except ResultTooLarge:
        raise
    except Exception:  # noqa: BLE001  # as RQ does
        text = json.dumps(UNSERIALIZABLE_RETURN_VALUE_PAYLOAD)
    if len(text) > most:
        raise ResultTooLarge(most)
    return text.encode()


def _dump_in_pieces(value: Any, most: int) -> str:
    text = io.StringIO()
    for piece in json.JSONEncoder().iterencode(value):
        text.write(piece)
        if text.tell() > most:
            raise ResultTooLarge(most)
    return text.getvalue()


def _measure(value: Any, most: int) -> tuple[int, int]:
    """Return a lower bound of a value's JSON bytes, and its number of values, until one is beyond `most`."""
    num_bytes = num_values = 0
    waiting = [value]
    while waiting and num_bytes <= most:
        each = waiting.pop()
        num_values += 1
        if isinstance(each, str):
            num_bytes += len(each) + 2
        elif isinstance(each, (dict, list, tuple)):
            num_bytes += 2 * len(each) or 2
            if num_bytes <= most:
                waiting.extend(each)
                if isinstance(each, dict):
                    waiting.extend(each.values())
        else:
            num_bytes += 1
    return num_bytes, num_values
