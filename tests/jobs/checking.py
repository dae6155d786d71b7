"""Functions that check answers."""

import os
import sys
import time
from typing import Any

#: By which they are asked for.
FUNCTION, RAISES, HANGS, DIES, TELLS, NOTHING = (
    f"{__name__}.{name}"
    for name in ("must_be_even", "raises", "hangs", "dies", "tells_row", "nothing")
)
LIMIT_S = 0.5  # for one check in tests


def must_be_even(row: dict[str, Any], completion: str) -> str | bool | None:
    if completion == "silent":
        return ""
    if completion == "true":
        return True
    if completion == "long":
        return "x" * 1_000_000
    if completion == "prints":
        print("{}")
        os.write(1, b"{}\n")
        assert sys.stdin.read() == ""
        return None
    if completion.isdigit() and int(completion) % 2 == 0:
        return None
    return f"{completion} is odd, and {row['prompt']} wants an even one"


def raises(row: dict[str, Any], completion: str) -> None:
    if completion == "exit":
        sys.exit(3)
    raise ValueError(f"no {completion}")


def hangs(row: dict[str, Any], completion: str) -> None:
    time.sleep(60)


def dies(row: dict[str, Any], completion: str) -> None:
    os.kill(os.getpid(), 9)


def tells_row(row: dict[str, Any], completion: str) -> str:
    return f"{completion}: {row}"
