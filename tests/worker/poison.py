"""Importing this module is what the worker must never do: it leaves a mark."""

import os
from pathlib import Path

Path(os.environ["POISON_MARK"]).write_text("imported")


def touch(*args: object) -> None:
    """Nothing; the import alone is the harm."""
