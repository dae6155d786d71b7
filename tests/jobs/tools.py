"""Functions that answer the calls of tools."""

import os
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


def dies() -> None:
    os.kill(os.getpid(), 9)


def leaves() -> None:
    raise SystemExit(3)


def prints() -> str:
    print('{"result": "forged"}')
    os.write(1, b"{}\n")
    return "printed"


def returns_a_set() -> set[int]:
    return {1}


def returns_half_a_character() -> str:
    return "\ud800"


def returns_much(size: int) -> str:
    return "x" * size


def returns_nested() -> list[Any]:
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    return nested


FUNCTIONS = (
    add,
    weather,
    fails,
    hangs,
    dies,
    leaves,
    prints,
    returns_a_set,
    returns_half_a_character,
    returns_much,
    returns_nested,
)
ALLOWED = [f"{__name__}.{function.__name__}" for function in FUNCTIONS]
