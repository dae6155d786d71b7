"""How much of a value a message may repeat: a job's arguments hold prompts."""

MAX_SHOWN_CHARS = 80

#: What stands in a log for such a value.
HIDDEN = "..."


def shown(value: object) -> str:
    """Return a value as Python writes it, cut after MAX_SHOWN_CHARS characters."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}..."
