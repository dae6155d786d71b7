"""The bench beside other engines: where our own seconds go."""

import time
from itertools import count

import pytest

from engine.sampling.parameter_values import brief
from ops.bench.parts import seconds_by_part


def test_a_librarys_seconds_are_those_of_the_engines_file_that_called_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = count()
    monkeypatch.setattr(
        time, "process_time", lambda: float(next(calls))
    )  # a second for each look at the clock
    parts = seconds_by_part(lambda: brief("text"))
    shown = next(calls)
    assert list(parts) == ["sampling/parameter_values.py", "other"]
    assert (
        shown - 6 <= parts["sampling/parameter_values.py"] < shown
    )  # the rest is the lambda's and the profiler's
    assert parts["other"] == 0
