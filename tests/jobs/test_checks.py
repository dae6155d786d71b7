"""What looks at an answer: functions, patterns, schemas, in processes of their own."""

from __future__ import annotations

import time
from typing import Any

import pytest

from jobs.context.checks.options import repair_options
from jobs.context.checks.processes import Checks
from jobs.errors import InvalidJob
from tests.jobs.checking import DIES, FUNCTION, HANGS, LIMIT_S, RAISES


def test_a_function_gets_row_and_answer_and_says_what_is_wrong(checks: Checks) -> None:
    options = repair_options(check={"function": FUNCTION})
    assert checks.reason(options, {"prompt": "x"}, "12") is None
    assert checks.reason(options, {"prompt": "naïve"}, "11") == "11 is odd, and naïve wants an even one"
    assert checks.reason(options, {}, "silent") == "the check gave no reason"
    assert checks.reason(options, {}, "true") == (
        "the check returned bool, expected None or the reason as a text"
    )
    assert len(checks.reason(options, {}, "long") or "") < 3_000
    assert checks.reason(options, {}, "prints") is None, "what it prints is none of its replies"


@pytest.mark.parametrize(
    ("check", "text", "says"),
    [
        ({"function": RAISES}, "x", "the check raised ValueError: no x"),
        ({"function": RAISES}, "exit", "the check raised SystemExit: 3"),
        ({"function": DIES}, "x", "the check ended its process with -9"),
        ({"function": HANGS}, "x", f"the check went on for more than {LIMIT_S} s"),
        ({"regex": "(a+)+b"}, "a" * 60, f"the check went on for more than {LIMIT_S} s"),
        ({"json": {}}, "[" * 200_000, "it is not JSON: maximum recursion"),
        ({"json": {}}, '{"a": NaN}', "it is not JSON: NaN is no value of JSON"),
        ({"json": {"$ref": "http://localhost:1/schema"}}, "1", "Unresolvable: http://localhost:1/schema"),
    ],
)
def test_a_check_that_fails_fails_the_attempt_and_the_next_is_checked(
    checks: Checks, check: dict[str, Any], text: str, says: str
) -> None:
    options = repair_options(check=check)
    assert says in (checks.reason(options, {}, text) or "")
    assert checks.reason(repair_options(check={"regex": "é+"}), {}, "éé") is None


def test_processes_end_with_the_one_that_asked() -> None:
    checks, options = Checks(), repair_options(check={"regex": "a"})
    assert checks.reason(options, {}, "a") is None
    (child,) = checks._pool._idle
    checks.close()
    assert not child.is_alive


def test_a_schema_that_takes_a_minute_to_compile_is_refused_in_seconds(checks: Checks) -> None:
    """1 MiB of it, in which other jobs' checks would wait."""
    began = time.monotonic()
    with pytest.raises(
        InvalidJob, match="the check went on for more than 2 s before it could check anything"
    ):
        checks.reason(repair_options(check={"json": {"allOf": [True] * 170_000}}), {}, "1")
    assert time.monotonic() - began < 20  # two, and what a new process takes to begin
