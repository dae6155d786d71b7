"""What a worker imports before it serves: all of ours that a job may need, and the operator's functions.

Later, in a thread, an import could be interrupted half way, or meet another one, and a thread that waited for
it goes on with a module half executed.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable

from worker.errors import FunctionNotFound, StartupError
from worker.store.user_code import import_function

_PARTS = ("worker.assembly", "jobs.parquet.planning.planner", "jobs.parquet.shards.shard_work")


def load_parts() -> None:
    """Import what jobs of our own need. Raises StartupError where the installation is not whole."""
    try:
        for name in _PARTS:
            importlib.import_module(name)
        import pyarrow

        pyarrow.array([None])  # it looks for pandas, and imports it, when it makes its first array
    except ImportError as error:
        raise StartupError(
            f"a part of the worker cannot be imported ({error}): install it anew, "
            "pip install 'tokenmill[worker]'"
        ) from error


def load_functions(names: Iterable[str]) -> None:
    """Import functions and callbacks by their dotted names, as RQ will. Raises FunctionNotFound."""
    for name in names:
        try:
            found = import_function(name)
        except Exception as error:
            raise FunctionNotFound(name, _reason(name, error)) from error
        if not callable(found):
            raise FunctionNotFound(name, TypeError(f"it is a {type(found).__name__}, expected a function"))


def _reason(name: str, error: Exception) -> Exception:
    """Why a function cannot be imported: RQ keeps to itself what its module needs and does not find."""
    try:
        importlib.import_module(name.rpartition(".")[0] or name)
    except Exception as reason:  # noqa: BLE001  # a module may raise what it likes
        return reason
    return error
