"""Functions that answer the calls of tools."""

import time
from typing import Any


def add(a: int, b: int) -> int:
    return a + b


def weather(city: str) -> dict[str, Any]:
    return {"city": city, "celsius": 21}


def fails() -> None:
    raise ValueError("no network")


def hangs() -> None:
    time.sleep(60)


NAMES = ("add", "weather", "fails", "hangs")
ALLOWED = [f"{__name__}.{name}" for name in NAMES]
