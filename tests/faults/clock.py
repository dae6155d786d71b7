"""A wall clock that jumps, in this process alone: the machine's own is everybody's."""

import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from types import FunctionType
from typing import Any

import rq.utils

_OURS = ("jobs", "worker", "engine", "rq", "redis")


_offset_s = [0.0]


def jump(seconds: float) -> None:
    """Set the wall clock that `install` has put in place off by `seconds`."""
    _offset_s[0] = seconds


def install() -> None:
    """Give every module of the worker, of RQ and of redis-py, if not built yet, a wall clock that can jump."""
    true_time, true_now, true_stamp = time.time, rq.utils.now, rq.utils.current_timestamp
    shifted: dict[Any, Callable[[], Any]] = {
        true_time: lambda: true_time() + _offset_s[0],
        true_now: lambda: datetime.now(UTC) + timedelta(seconds=_offset_s[0]),
        true_stamp: lambda: int(true_time() + _offset_s[0]),
    }
    for function in _functions():
        if function.__defaults__ and any(
            _is_key(value, shifted) for value in function.__defaults__
        ):
            function.__defaults__ = tuple(
                shifted[value] if _is_key(value, shifted) else value
                for value in function.__defaults__
            )
        keywords = function.__kwdefaults__ or {}
        for name, value in keywords.items():
            if _is_key(value, shifted):
                keywords[name] = shifted[value]
    for module in _modules():
        for name, value in list(vars(module).items()):
            if _is_key(value, shifted):
                setattr(module, name, shifted[value])
    time.time = shifted[true_time]


def _is_key(value: Any, shifted: dict[Any, Any]) -> bool:
    return any(value is key for key in shifted)


def _modules() -> Iterator[Any]:
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in _OURS:
            yield module


def _functions() -> Iterator[FunctionType]:
    for module in _modules():
        for value in list(vars(module).values()):
            members = list(vars(value).values()) if isinstance(value, type) else [value]
            yield from (member for member in members if isinstance(member, FunctionType))
