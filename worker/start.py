"""What a worker sets and imports before it has threads: OpenMP, import path, memory, users' functions."""

import ctypes
import importlib
import logging
import os
import sys
from collections.abc import Iterable, MutableMapping

import click
from click.core import ParameterSource

from jobs.doctor.redis_server import NOT_SERVED, not_served
from worker.errors import FunctionNotFound, StartupError
from worker.store.user_code import import_function

_SPIN_COUNT = 10_000
"""Looks at the flag before a thread sleeps, 0.1 ms by libgomp's own estimate."""


def spin_briefly(environment: MutableMapping[str, str]) -> None:
    """Have idle threads spin for a moment and then sleep; call it before torch is loaded.

    libgomp spins 30 times as long, and a waiting thread then holds a processor that others need. Without spinning each
    product wakes its threads anew, which costs a quarter of the speed on a free machine. Settings of the operator
    (OMP_WAIT_POLICY, GOMP_SPINCOUNT) stay. Source: libgomp's manual, GOMP_SPINCOUNT.
    """
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", str(_SPIN_COUNT))


def called_by_rq_command() -> bool:
    """Whether `rq worker` or `rq worker-pool` is the caller, which prints any error's traceback."""
    context = click.get_current_context(silent=True)
    return context is not None and getattr(context.command.callback, "__module__", "").startswith("rq.cli")


class RedisErrorsInOneLine(logging.Filter):
    """Makes one line of the traceback that RQ's command logs if Redis does not serve it."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Rewrite a record about Redis not serving; let everything pass."""
        if isinstance(record.msg, NOT_SERVED) and called_by_rq_command():
            found = not_served(click.get_current_context().params.get("url") or "", record.msg)
            record.msg, record.args, record.exc_info = f"{found.found}: {found.mend}", (), None
        return True


def leave_out_working_directory() -> None:
    """Take the working directory, put there by RQ's command or `python -m`, off the import path.

    Paths of `--path`, PYTHONPATH or an installation stay. Does nothing under any other program.
    """
    if not called_by_rq_command():
        return
    has_no_path = click.get_current_context().get_parameter_source("path") in (None, ParameterSource.DEFAULT)
    if "." in sys.path and has_no_path:
        del sys.path[len(sys.path) - 1 - sys.path[::-1].index(".")]
    # `python -m` has put it first.
    is_run_as_module = sys.modules["__main__"].__spec__ is not None and not sys.flags.safe_path
    if is_run_as_module and sys.path[0] in ("", os.getcwd()):
        del sys.path[0]


# glibc's mallopt parameters (malloc.h).
_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8

_MAPPED_BYTES = 1 << 18
"""Larger blocks, such as a decoded page, are mapped one by one and go back to the kernel when freed."""


def share_freed_memory() -> None:
    """Let every thread of this process use memory that another has freed; call it before there are any.

    pyarrow's own allocator keeps memory that one thread allocates and another frees, as shards do: 38 MiB for 5 in use
    after 4,000 shards. glibc's arena for each thread loses planning's freed memory to the threads that read, and
    ever larger blocks on its heap leave gaps: 10 MiB within 3,000 shards. An engine on a CPU chooses anew when it is
    loaded (engine/run/forward/memory.py).

    Settings of the operator (ARROW_DEFAULT_MEMORY_POOL, MALLOC_ARENA_MAX, MALLOC_MMAP_THRESHOLD_) stay, as does a C
    library without mallopt. Source: mallopt(3).
    """
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")  # read by pyarrow when it is loaded
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    for parameter, value, variable in (
        (_M_ARENA_MAX, 1, "MALLOC_ARENA_MAX"),
        (_M_MMAP_THRESHOLD, _MAPPED_BYTES, "MALLOC_MMAP_THRESHOLD_"),
    ):
        if variable not in os.environ:
            mallopt(parameter, value)


_PARTS = ("worker.assembly", "jobs.parquet.planning.planner", "jobs.parquet.shards.shard_work")


def load_parts() -> None:
    """Import the libraries of our own jobs. Raises StartupError if the installation is not whole."""
    try:
        for name in _PARTS:
            importlib.import_module(name)
        import pyarrow

        pyarrow.array([None])  # it looks for pandas, and imports it, when it makes its first array
    except ImportError as error:
        raise StartupError(
            f"a part of the worker cannot be imported ({error}): install it anew, pip install 'tokenmill[worker]'"
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
    """Say why a function cannot be imported: RQ hides the missing module."""
    try:
        importlib.import_module(name.rpartition(".")[0] or name)
    except Exception as reason:  # noqa: BLE001  # a module may raise what it likes
        return reason
    return error
