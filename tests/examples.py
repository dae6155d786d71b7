"""How many examples a property gets: all of them among the long tests, half in the default tier."""

from hypothesis import HealthCheck, settings

ALL = 100
"""The examples of a property that does not say how many, among the long tests."""


def load_profile(*, is_long: bool) -> None:
    """Choose the examples of all properties. Called before test modules are imported.

    The cases are the same in every run, and no verdict depends on the clock, because a busy machine is slow.
    """
    settings.register_profile(
        "tokenmill",
        max_examples=ALL if is_long else ALL // 2,
        derandomize=True,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("tokenmill")


def examples(number: int) -> int:
    """Return this number of examples among the long tests, half of it in the default tier."""
    return number if settings.default.max_examples == ALL else (number + 1) // 2
