"""Compiling a kernel once for each machine, keeping it where nobody else may write, and running it."""

import ctypes
import gc
import hashlib
import logging
import os
import shutil
import signal
import stat
import struct
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numba
import torch
from numba import types
from numba.core.codegen import get_host_cpu_features
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target
from numba.misc.appdirs import AppDirs
from torch import Tensor

from engine.cpu_kernels.scalars import BFLOAT16, FLOAT32, fetch_add, helper
from engine.kernels import weight_constants
from engine.kernels.products import codes

FIRST_ARGUMENT = 3  # before it: the next task, the next worker, the number of tasks
SIGNATURE = types.void(types.CPointer(types.int64))
CHECKSUM = "sha256"  # of the other files of its folder
BITS = struct.Struct("q")
DOUBLE = struct.Struct("d")
OPTIONS = {"error_model": "numpy"}  # divisions need no check: nobody could catch what it raises

ELEMENTS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16}  # what kernels are compiled for

LONGEST_COMPILING_S = 60  # a child that another thread's lock holds up ends then

T = TypeVar("T")
_missing: ContextVar[list["Kernel"] | None] = ContextVar("missing kernels", default=None)

if numba.config.CPU_FEATURES is None and "+avx512f" in get_host_cpu_features():
    # before anything is compiled: loops get vectors of 64 bytes, as the inner loops of attention have, not of 32
    numba.config.CPU_FEATURES = f"{get_host_cpu_features()},-prefer-256-bit"

logger = logging.getLogger(__name__)


@helper()
def next_task(parameters: Any) -> Any:
    """Return the next task that no thread has taken, -1 if there is none left. For use in a kernel."""
    task = fetch_add(parameters, 0)
    return task if task < parameters[2] else -1


@helper()
def worker_number(parameters: Any) -> Any:
    """Return this thread's number among those that run the kernel, from 0. A kernel calls it once in each thread."""
    return fetch_add(parameters, 1)


class Kernel:
    """A function compiled to machine code, run by torch's threads until its tasks are done.

    Numba compiles function(parameters). The arguments of a call are in `parameters` from FIRST_ARGUMENT on, one
    int64 each: a tensor's address, an integer, or a float's bits. The function takes tasks with `next_task` until
    that returns -1.
    """

    def __init__(self, function: Callable[[Any], None]) -> None:
        self.function = function
        self._entry: Any = None
        self._is_ready()

    def compile(self) -> None:
        """Compile the function, or take its machine code from the cache."""
        self._compiled = _compile(self.function)
        self._entry = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._compiled.address)

    def _is_ready(self) -> bool:
        """Compile the kernel or load it, and return True.

        Within `run_compiled`, a kernel that is not in the cache is only noted, and False is returned.
        """
        missing = _missing.get()
        if missing is not None and self in missing:
            return False
        if missing is None or (cache_root() / _digest(self.function)).exists():
            self.compile()
            return True
        missing.append(self)
        return False

    def __call__(self, num_tasks: int, *arguments: Tensor | int | float) -> None:
        """Run the tasks 0 to num_tasks - 1; tensors must be contiguous where the kernel expects it."""
        if self._entry is None and not self._is_ready():
            return  # `run_compiled` runs again, and drops the results of this run
        # most are integers; a call of _as_int64 for each took a tenth of a decode step of one sequence
        values = [each if type(each) is int else _as_int64(each) for each in arguments]
        parameters = (ctypes.c_int64 * (FIRST_ARGUMENT + len(values)))(0, 0, num_tasks, *values)
        num_threads = min(num_tasks, torch.get_num_threads())
        if num_threads > 1:
            _run_in_team()(self._entry, parameters, num_threads)
        elif num_threads == 1:
            self._entry(parameters)


def run_compiled(run: Callable[[], T]) -> T:
    """Return what `run` computes. If kernels are missing, compile them side by side and let it run once more."""
    missing: list[Kernel] = []
    reset_token = _missing.set(missing)
    try:
        result = run()
    finally:
        _missing.reset(reset_token)
    if not missing:
        return result
    with suppress(OSError):  # without children, or if they fail, kernels are compiled below
        if sys.platform == "linux" and os.access(_own_root(), os.W_OK):
            _compile_in_children([kernel.function for kernel in missing])
    for kernel in missing:
        kernel.compile()
    return run()


def _compile_in_children(functions: list[Callable[[Any], None]]) -> None:
    """Compile functions into the cache in several child processes: Numba compiles one at a time in a process.

    A child may fail. The caller compiles what is then missing.
    """
    tasks, write_end = os.pipe()
    os.write(write_end, bytes(range(len(functions))))
    os.close(write_end)
    children: list[int] = []
    try:
        # else a child could inherit the lock from a thread that holds it, and wait forever
        with global_compiler_lock:
            for _ in range(min(len(functions), torch.get_num_threads())):
                child = os.fork()
                if not child:
                    _compile_and_end(functions, tasks)
                children.append(child)
        while children:
            os.waitpid(children[-1], 0)
            children.pop()
    finally:
        os.close(tasks)
        for child in children:  # left only if this process was interrupted
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _compile_and_end(functions: list[Callable[[Any], None]], tasks: int) -> None:
    """Compile functions in this child process until none is left, then end the process.

    tasks: a pipe with the functions' numbers, one byte each. All children read it, and each number goes to one of them.
    """
    try:
        for number in (signal.SIGALRM, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        signal.alarm(LONGEST_COMPILING_S)
        gc.disable()  # it took a tenth of the time, and the process ends soon
        while number_read := os.read(tasks, 1):
            function = functions[number_read[0]]
            _compile_into(_own_root() / _digest(function), function)
    finally:
        os._exit(0)


def _as_int64(argument: Tensor | int | float) -> int:
    if isinstance(argument, Tensor):
        return argument.data_ptr()
    if isinstance(argument, float):
        bits: int = BITS.unpack(DOUBLE.pack(argument))[0]
        return bits
    return argument


def _compile(function: Callable[[Any], None]) -> Any:
    """Return the function's machine code: from the cache if that is undamaged and no other user may write there."""
    root = cache_root()
    try:
        folder = _own_root() / _digest(function)
        if folder.exists() and not _is_whole(folder):
            logger.warning("a CPU kernel is compiled anew: %s is damaged", folder)
            shutil.rmtree(folder, ignore_errors=True)
        return _cached(function, folder) if folder.exists() else _compile_into(folder, function)
    except Exception as error:  # noqa: BLE001 - unpickling may raise anything; a kernel's fault is raised again below
        logger.warning(
            "CPU kernels are compiled at each start, a few seconds: %s does not serve (%r); let this user "
            "write there, or remove it",
            root,
            error,
        )
        return numba.cfunc(SIGNATURE, **OPTIONS)(function)


def _own_root() -> Path:
    """Make the cache's folder if need be, and return it. Raises OSError if another user may write there."""
    root = cache_root()
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    if problem := exposure(root.resolve()):
        raise PermissionError(f"{problem}; correct that, or remove {root}")
    return root


def exposure(folder: Path) -> str | None:
    """Say why another user may have written into the folder; None if no other user can have."""
    found = folder.stat()
    if found.st_uid not in (0, os.geteuid()):
        return f"{folder} belongs to user {found.st_uid}"
    if found.st_mode & 0o022:
        return f"{folder} may be written by others (mode {stat.S_IMODE(found.st_mode):o})"
    return None


def _compile_into(folder: Path, function: Callable[[Any], None]) -> Any:
    """Compile, then rename the folder into place, so that another process finds it whole."""
    made = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        compiled = _cached(function, made)
        (made / CHECKSUM).write_text(_checksum(made))
        with suppress(OSError):  # another process was sooner
            made.rename(folder)
        return compiled
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _cached(function: Callable[[Any], None], folder: Path) -> Any:
    """Compile the function into a cache in this folder, or load it from there."""
    configured = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(folder)
    try:
        return numba.cfunc(SIGNATURE, cache=True, **OPTIONS)(function)
    finally:
        numba.config.CACHE_DIR = configured


def _is_whole(folder: Path) -> bool:
    kept = folder / CHECKSUM
    return kept.is_file() and kept.read_text() == _checksum(folder)


def _checksum(folder: Path) -> str:
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != CHECKSUM)
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def cache_root() -> Path:
    """Return the folder for compiled code: the one in Numba's own setting, else one in the user's cache folder."""
    return Path(
        numba.config.CACHE_DIR
        or Path(AppDirs("tokenmill", appauthor=False).user_cache_dir) / "kernels"
    )


def _digest(function: Callable[[Any], None]) -> str:
    """Return a name for the function's machine code: a hash of everything that the code depends on.

    That is the function, the values it closes over, its helpers, the processor, Numba and Python.
    """
    contents = [cell.cell_contents for cell in function.__closure__ or ()]
    # the other values are helpers: the hash has their sources
    constants = [value for value in contents if isinstance(value, (int, str, types.Type))]
    written = Path(function.__code__.co_filename).stat().st_mtime_ns
    processor = cpu_target.target_context.codegen().magic_tuple()
    names = (function.__qualname__, constants, written, processor, numba.__version__, sys.version)
    sources = [
        *sorted(Path(__file__).parent.glob("*.py")),
        Path(weight_constants.__file__),
        Path(codes.__file__),
    ]
    parts = [repr(names).encode(), *(path.read_bytes() for path in sources)]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:32]


@cache
def _run_in_team() -> Callable[[Any, Any, int], None]:
    """Return a function that calls a kernel's entry in several threads.

    The threads are torch's OpenMP team if possible, because a second pool would compete with it for the cores.
    """
    library = _torch_libgomp()
    if library is not None:
        start = library.GOMP_parallel
        start.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
        start.restype = None
        return lambda entry, parameters, num_threads: start(entry, parameters, num_threads, 0)
    logger.info(
        "torch's OpenMP runtime is not libgomp here: CPU kernels run on threads of their own"
    )
    pool = ThreadPoolExecutor(thread_name_prefix="cpu-kernel")  # ctypes releases the GIL

    def run(entry: Any, parameters: Any, num_threads: int) -> None:
        others = [pool.submit(entry, parameters) for _ in range(num_threads - 1)]
        entry(parameters)
        for other in others:
            other.result()

    return run


def _torch_libgomp() -> ctypes.CDLL | None:
    """Return the libgomp that torch has loaded, None if it uses another OpenMP."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    paths = {Path(line.split(maxsplit=5)[5]) for line in lines if "libgomp" in line}
    folder = Path(torch.__file__).parent
    own = [
        path for path in paths if path.is_relative_to(folder) or path.parent.name == "torch.libs"
    ]
    found = own or list(paths)
    return ctypes.CDLL(str(found[0])) if len(found) == 1 else None
