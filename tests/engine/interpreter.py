"""Triton's interpreter, sparing it a search that it makes for each call of a kernel's inner function."""

import inspect
from types import FunctionType, ModuleType
from typing import Any

import pytest


def patch_language_once_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patch `triton.language` once a launch; the interpreter does it at each call of an inner function, slowly."""
    from triton import language
    from triton.runtime import interpreter

    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: set[ModuleType] = set()

    def patch_what_is_not(function: FunctionType) -> Any:
        used = {value for value in function.__globals__.values() if inspect.ismodule(value)}
        used &= {language, language.core}
        if used <= patched:
            return None  # of an inner function; only the launch's own is asked to restore anything
        patched.update(used)
        return patch(function)

    def launch_anew(self: Any, *args: Any, **kwargs: Any) -> Any:
        patched.clear()
        return launch(self, *args, **kwargs)

    monkeypatch.setattr(interpreter, "_patch_lang", patch_what_is_not)
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch_anew)
