"""What a worker sets and imports before it starts threads: OpenMP, import path, memory, users' functions."""

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
"""How often an idle thread checks for work before it sleeps. By libgomp's manual this takes 0.1 ms."""


def spin_briefly(environment: MutableMapping[str, str]) -> None:
    """Have idle OpenMP threads spin for a moment and then sleep. Call it before torch is loaded.

    By default libgomp spins 30 times as long, and a spinning thread holds a processor that other threads need. Without
    any spinning, each matrix product wakes its threads again, which costs a quarter of the speed on an idle machine.
    The operator's settings (OMP_WAIT_POLICY, GOMP_SPINCOUNT) stay. Source: libgomp's manual, GOMP_SPINCOUNT.
    """
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", str(_SPIN_COUNT))


def called_by_rq_command() -> bool:
    """Whether `rq worker` or `rq worker-pool` has called this code. These commands print the traceback of any error."""
    context = click.get_current_context(silent=True)
    if context is None:
        return False
    module: str = getattr(context.command.callback, "__module__", "")
    return module.startswith("rq.cli")


class RedisErrorsInOneLine(logging.Filter):
    """Logs one line in place of the traceback that RQ's command logs if it cannot use Redis."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Rewrite a record about an unusable Redis. Returns True, so that every record is logged."""
        # RQ's command passes the error object as the message.
        if isinstance(record.msg, NOT_SERVED) and called_by_rq_command():
            url = click.get_current_context().params.get("url") or ""
            finding = not_served(url, record.msg)
            record.msg = f"{finding.text}: {finding.mend}"
            record.args = ()
            record.exc_info = None
        return True


def leave_out_working_directory() -> None:
    """Take the working directory off the import path, where RQ's command or `python -m` has put it.

    Paths from `--path`, PYTHONPATH or an installation stay. In a program that is not RQ's command, this does nothing.
    """
    if not called_by_rq_command():
        return
    path_source = click.get_current_context().get_parameter_source("path")
    has_path_option = path_source not in (None, ParameterSource.DEFAULT)
    if "." in sys.path and not has_path_option:
        positions = [position for position, folder in enumerate(sys.path) if folder == "."]
        del sys.path[positions[-1]]  # the last one, because RQ's command adds it at the end

    # `python -m` puts the working directory first, unless Python was started with -P.
    is_run_as_module = sys.modules["__main__"].__spec__ is not None
    python_adds_directory = is_run_as_module and not sys.flags.safe_path
    if python_adds_directory and sys.path[0] in ("", os.getcwd()):
        del sys.path[0]


# Parameters of glibc's mallopt (malloc.h).
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8

_MAPPED_BYTES = 1 << 18
"""A block of more bytes, such as a decoded page, gets a mapping of its own. It goes back to the kernel once freed."""


def share_freed_memory() -> None:
    """Let every thread use memory that another thread has freed. Call it before threads are started.

    When shards are processed, one thread allocates memory and another frees it. pyarrow's own allocator keeps such
    memory: after 4,000 shards it held 38 MiB, of which 5 MiB were in use. So glibc's allocator takes its place.

    All threads get one arena of glibc. With an arena for each thread, the threads that read shards could not use memory
    that the planning thread has freed. Large blocks are kept out of glibc's heap, because growing blocks leave gaps
    there: 10 MiB within 3,000 shards. An engine on a CPU sets glibc's values again when it is loaded
    (engine/run/forward/memory.py).

    The operator's settings (ARROW_DEFAULT_MEMORY_POOL, MALLOC_ARENA_MAX, MALLOC_MMAP_THRESHOLD_) stay. With a C library
    that has no mallopt, only pyarrow's allocator is set. Source: mallopt(3).
    """
    # pyarrow reads this variable when it is loaded.
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    if "MALLOC_ARENA_MAX" not in os.environ:
        mallopt(_M_ARENA_MAX, 1)
    if "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)


_PARTS = ("worker.assembly", "jobs.parquet.planning.planner", "jobs.parquet.shards.shard_work")


def load_parts() -> None:
    """Import the libraries of our own jobs. Raises StartupError if the installation is incomplete."""
    try:
        for name in _PARTS:
            importlib.import_module(name)
        import pyarrow

        # pyarrow imports pandas, if it is installed, when the first array is made. This array makes it happen now.
        pyarrow.array([None])
    except ImportError as error:
        raise StartupError(
            f"a part of the worker cannot be imported ({error}): install it again, pip install 'tokenmill[worker]'"
        ) from error


def load_functions(names: Iterable[str]) -> None:
    """Import functions and callbacks by their dotted names, as RQ does. Raises FunctionNotFound."""
    for name in names:
        try:
            function = import_function(name)
        except Exception as error:
            raise FunctionNotFound(name, _reason(name, error)) from error
        if not callable(function):
            raise FunctionNotFound(
                name, TypeError(f"it is a {type(function).__name__}, expected a function")
            )


def _reason(name: str, error: Exception) -> Exception:
    """Return why a function cannot be imported. RQ's own error, `error`, does not say which module is missing."""
    module_name, _, _ = name.rpartition(".")
    try:
        importlib.import_module(module_name or name)
    except Exception as reason:  # noqa: BLE001  # a module may raise what it likes
        return reason
    return error
