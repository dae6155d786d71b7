"""What a message may repeat of a value, and how: arguments hold prompts, and names are what others chose."""

from __future__ import annotations

MAX_SHOWN_CHARS = 80

#: What stands in a log for such a value.
HIDDEN = "..."


def shown(value: object) -> str:
    """Return a value as Python writes it, cut after MAX_SHOWN_CHARS characters."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}..."


#: Characters of a name, such as a job's id, that a message shows. Ours have fewer.
MAX_NAME_CHARS = 255


def printable(text: str | bytes, kept: str = "") -> str:
    """Return text with each character escaped that a terminal may obey or not show, but those in `kept`."""
    if isinstance(text, bytes):
        text = text.decode(errors="backslashreplace")
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() or each in kept else each.encode("unicode_escape").decode()
        for each in text
    )


def safe_name(name: str | bytes) -> str:
    """Return a name as a message may show it: printable, and cut after MAX_NAME_CHARS characters."""
    cut = name[:MAX_NAME_CHARS]
    return printable(cut) if len(cut) == len(name) else f"{printable(cut)}..."
