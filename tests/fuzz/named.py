"""What counts as a named error in a text that a user sees."""

import re

NAMED = re.compile(r"^(jobs|engine|worker)\.errors\.\w+: .", re.MULTILINE)
"""The last line of a traceback that ends in an error of ours."""


def check_says(error: Exception) -> None:
    """A refusal has a text."""
    assert str(error), f"{type(error).__name__} says nothing"
