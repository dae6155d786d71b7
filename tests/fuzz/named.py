"""What counts as a named error in a text that a user sees."""

import re

NAMED = re.compile(r"^(jobs|engine|worker)\.errors\.\w+: .", re.MULTILINE)
"""The last line of a traceback that ends in an error of ours."""


def check_says(error: Exception, *expected: str) -> None:
    """A refusal has a text, and names one of `expected` where there are any."""
    text = str(error)
    assert text, f"{type(error).__name__} says nothing"
    assert not expected or any(name in text for name in expected), text
