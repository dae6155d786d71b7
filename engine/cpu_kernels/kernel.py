"""Compiling a kernel once for each machine, keeping it where nobody else may write, and running it."""

import ctypes
import hashlib
import logging
import os
import stat
import struct
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numba
import torch
from numba import njit, types
from numba.misc.appdirs import AppDirs
from torch import Tensor

from engine.cpu_kernels.scalars import BFLOAT16, FLOAT32, fetch_add
from engine.kernels import token_weights


def make_private(folder: Path) -> None:
    """Make the folder, and what is missing above it, for this user alone. Raises OSError."""
    for path in [*reversed(folder.parents), folder]:
        if not path.exists():
            path.mkdir(mode=0o700, exist_ok=True)


def close_to_others(folder: Path) -> None:
    """Take from all others the right to write what this process has put below the folder."""
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):  # another process' temporary file
            path.chmod(0o700 if path.is_dir() else 0o600)


def exposure(folder: Path) -> str | None:
    """Say which path another user may have written: below the folder, itself, or above it. None: no path.

    folder: without links, as `Path.resolve` gives it.
    """
    for path in (*folder.parents, folder, *folder.rglob("*")):
        with suppress(FileNotFoundError):
            if problem := _problem(path.lstat(), sticky_will_do=path in folder.parents):
                return f"{path} {problem}"
    return None


def _problem(found: os.stat_result, *, sticky_will_do: bool) -> str | None:
    """In a folder with the sticky bit, such as /tmp, nobody can replace what belongs to another."""
    if found.st_uid not in (0, os.geteuid()):
        return f"belongs to user {found.st_uid}"
    if stat.S_ISLNK(found.st_mode):
        return "is a link"
    if found.st_mode & 0o022 and not (sticky_will_do and found.st_mode & stat.S_ISVTX):
        return f"may be written by others (mode {stat.S_IMODE(found.st_mode):o})"
    return None


SUFFIXES = (".nbi", ".nbc")  # Numba's indexes, and the machine code
SEAL = hashlib.sha256().digest_size


def seal_files(folder: Path) -> None:
    """Give each file below the folder its checksum, where it has none. Raises OSError.

    Each is replaced by its sealed copy in one step: another process reads the one or the other.
    """
    for path in _kept(folder):
        with suppress(FileNotFoundError):  # another process found it without a seal
            contents = path.read_bytes()
            if not _is_sealed(contents):
                _replace(path, contents + hashlib.sha256(contents).digest())


def remove_damaged(folder: Path) -> list[Path]:
    """Remove what does not match its checksum, or has none; return the paths. Raises OSError."""
    damaged = []
    for path in _kept(folder):
        with suppress(FileNotFoundError):
            if not _is_sealed(path.read_bytes()):
                path.unlink()
                damaged.append(path)
    return damaged


def _kept(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES)


def _is_sealed(contents: bytes) -> bool:
    return hashlib.sha256(contents[:-SEAL]).digest() == contents[-SEAL:]


def _replace(path: Path, contents: bytes) -> None:
    descriptor, temporary = tempfile.mkstemp(prefix=f"{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with open(descriptor, "wb") as file:
            file.write(contents)
        os.replace(temporary, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


FIRST_ARGUMENT = 3  # before it: the next task, the next worker, the number of tasks
SIGNATURE = types.void(types.CPointer(types.int64))
BITS, DOUBLE = struct.Struct("q"), struct.Struct("d")
OPTIONS = {"error_model": "numpy"}  # divisions need no check: nobody could catch what it raises

ELEMENTS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16}  # what kernels are compiled for

logger = logging.getLogger(__name__)


@njit  # type: ignore[untyped-decorator]
def next_task(parameters: Any) -> Any:
    """The next task no thread has taken, -1 if there is none left. For use in a kernel."""
    task = fetch_add(parameters, 0)
    return task if task < parameters[2] else -1


@njit  # type: ignore[untyped-decorator]
def worker_number(parameters: Any) -> Any:
    """A number from 0 for each thread that runs the kernel; ask once. For use in a kernel."""
    return fetch_add(parameters, 1)


class Kernel:
    """A function compiled to machine code, run by torch's threads until its tasks are done.

    function(parameters) is compiled by Numba; parameters are int64 from FIRST_ARGUMENT on: a tensor's address
    or an integer each, a float's bits (vectors.float_of). It takes tasks with `next_task` until that says -1.
    The machine code is kept in the user's cache folder, where that can be written and by nobody else.
    """

    def __init__(self, function: Callable[[Any], None]) -> None:
        self._compiled = _compile(function)
        self._entry = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._compiled.address)

    def __call__(self, num_tasks: int, *arguments: Tensor | int | float) -> None:
        """Run the tasks 0 to num_tasks - 1; tensors must be contiguous where the kernel expects it."""
        # most are integers; a call of _as_int64 for each took a tenth of a decode step of one sequence
        values = [each if type(each) is int else _as_int64(each) for each in arguments]
        parameters = (ctypes.c_int64 * (FIRST_ARGUMENT + len(values)))(0, 0, num_tasks, *values)
        num_threads = min(num_tasks, torch.get_num_threads())
        if num_threads > 1:
            _run_in_team()(self._entry, parameters, num_threads)
        elif num_threads == 1:
            self._entry(parameters)


def _as_int64(argument: Tensor | int | float) -> int:
    if isinstance(argument, Tensor):
        return argument.data_ptr()
    if isinstance(argument, float):
        bits: int = BITS.unpack(DOUBLE.pack(argument))[0]
        return bits
    return argument


def _compile(function: Callable[[Any], None]) -> Any:
    """Machine code of the function, from the cache or for it; without a cache that serves, anew.

    What is in the cache is run, so it is not read where another user may have written it, nor where it is not
    what has been written: a loss of power, or a full disk, leaves files that unpickle and then crash.
    """
    users = numba.config.CACHE_DIR
    folder = cache_root() / _digest(function)
    numba.config.CACHE_DIR = str(folder)
    try:
        make_private(folder)
        if problem := exposure(folder.resolve()):
            raise PermissionError(f"{problem}; correct that, or remove {folder}")
        if damaged := remove_damaged(folder):
            names = ", ".join(map(str, damaged))
            logger.warning("a CPU kernel is compiled anew: damaged, or not written to its end: %s", names)
        compiled = numba.cfunc(SIGNATURE, cache=True, **OPTIONS)(function)
        if not compiled.cache_hits:
            close_to_others(folder)
            seal_files(folder)
        return compiled
    except Exception as error:  # noqa: BLE001 - whatever unpickling may raise; a fault of the kernel's comes again
        logger.warning(
            "CPU kernels are compiled at each start, a few seconds: %s does not serve (%r); let this user "
            "write there, or remove it",
            folder,
            error,
        )
        return numba.cfunc(SIGNATURE, **OPTIONS)(function)
    finally:
        numba.config.CACHE_DIR = users


def cache_root() -> Path:
    """The folder that machine code is kept in: Numba's own setting, or one of the user's cache folder."""
    return Path(
        numba.config.CACHE_DIR or Path(AppDirs("tokenmill", appauthor=False).user_cache_dir) / "kernels"
    )


def _digest(function: Callable[[Any], None]) -> str:
    """A name for the machine code of this function with what it closes over and the sources of its helpers.

    Numba's own key has the function's file alone, so a folder holds one kernel of one version: neither can
    old code be taken for new, nor can two processes that write at once mix up two kernels.
    """
    contents = [cell.cell_contents for cell in function.__closure__ or ()]
    # the others are helpers, in the sources
    constants = [value for value in contents if isinstance(value, (int, types.Type))]
    parts = [function.__qualname__.encode(), repr(constants).encode()]
    sources = [*sorted(Path(__file__).parent.glob("*.py")), Path(token_weights.__file__)]
    parts += [path.read_bytes() for path in sources]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:32]


@cache
def _run_in_team() -> Callable[[Any, Any, int], None]:
    """How to call an entry in several threads at once: on torch's OpenMP team, or on Python threads.

    Two pools would fight for the cores: an OpenMP thread that has nothing to do spins for a while.
    """
    library = _torch_libgomp()
    if library is not None:
        start = library.GOMP_parallel
        start.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
        start.restype = None
        return lambda entry, parameters, num_threads: start(entry, parameters, num_threads, 0)
    logger.info("torch's OpenMP runtime is not libgomp here: CPU kernels run on threads of their own")
    pool = ThreadPoolExecutor(thread_name_prefix="cpu-kernel")  # ctypes releases the GIL

    def run(entry: Any, parameters: Any, num_threads: int) -> None:
        others = [pool.submit(entry, parameters) for _ in range(num_threads - 1)]
        entry(parameters)
        for other in others:
            other.result()

    return run


def _torch_libgomp() -> ctypes.CDLL | None:
    """The libgomp this process' torch has loaded, None if it uses another OpenMP or cannot be asked."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    paths = {Path(line.split(maxsplit=5)[5]) for line in lines if "libgomp" in line}
    folder = Path(torch.__file__).parent
    own = [path for path in paths if path.is_relative_to(folder) or path.parent.name == "torch.libs"]
    found = own or list(paths)
    return ctypes.CDLL(str(found[0])) if len(found) == 1 else None
