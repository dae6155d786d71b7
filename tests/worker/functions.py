"""Functions and callbacks for worker tests; they leave their traces in Redis."""

import ctypes
import errno
import json
import os
import signal
import socket
import threading
import time
from tempfile import NamedTemporaryFile
from typing import Any

from redis import Redis
from rq import Queue, Retry, get_current_job
from rq.job import Job, JobStatus
from rq.serializers import JSONSerializer


def add(a: int, b: int) -> int:
    return a + b


def boom(message: str) -> None:
    raise ValueError(message)


def meet(key: str) -> str:
    """Wait until somebody pushes to `key`; tell that we are there."""
    job = get_current_job()
    assert job is not None
    job.connection.rpush(f"{key}:waiting", job.id)
    while not (found := job.connection.lpop(key)):
        time.sleep(0.01)
    return str(found.decode())


def alter(field: str, value: Any, key: str = "") -> None:
    """Set an attribute of the copy of the job that its code gets; then wait for a push to `key`, or fail."""
    job = get_current_job()
    assert job is not None
    connection = job.connection
    setattr(job, field, value)
    if not key:
        raise ValueError("altered")
    connection.blpop([key], timeout=60)


def ask_for_retry_at_no_time() -> Retry:
    return Retry(max=3, interval=[float("nan")])


class Unshowable(Exception):
    """Of which no traceback can be made."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"no {name}")


def raise_unshowable() -> None:
    raise Unshowable


def on_success_alters_and_saves(job: Job, connection: Redis, result: Any) -> None:
    job.result_ttl = "soon"  # type: ignore[assignment]
    job.save()


def on_failure_alters(job: Job, connection: Redis, kind: Any, value: Any, trace: Any) -> None:
    job.failure_ttl = "soon"  # type: ignore[assignment]


def ask_for_retry(times: int) -> Any:
    job = get_current_job()
    assert job is not None
    return Retry(max=times) if (job.number_of_retries or 0) < times else "done"


def on_success(job: Job, connection: Redis, result: Any) -> None:
    connection.rpush("callbacks", f"success:{job.id}")


def on_failure(job: Job, connection: Redis, kind: Any, value: Any, trace: Any) -> None:
    connection.rpush("callbacks", f"failure:{job.id}:{kind.__name__}")


def on_stopped(job: Job, connection: Redis) -> None:
    connection.rpush("callbacks", f"stopped:{job.id}")


def on_success_raises(job: Job, connection: Redis, result: Any) -> None:
    raise RuntimeError("the success callback raised")


def ignore(*anything: Any) -> None:
    """A callback that cannot fail."""


def on_failure_raises(job: Job, connection: Redis, kind: Any, value: Any, trace: Any) -> None:
    raise RuntimeError("the failure callback raised")


def on_stopped_raises(job: Job, connection: Redis) -> None:
    raise RuntimeError("the stopped callback raised")


def always_ask_for_retry(times: int, interval: int = 0, at_front: bool = False) -> Retry:
    return Retry(max=times, interval=interval, enqueue_at_front=at_front)


def report(**progress: Any) -> str:
    job = get_current_job()
    assert job is not None
    job.meta.update(progress)
    job.save_meta()
    return "reported"


def save_own_copy(message: str = "") -> str:
    """Save the job that runs, then fail where there is a message."""
    job = get_current_job()
    assert job is not None
    job.meta["saved"] = True
    job.save()
    if message:
        raise ValueError(message)
    return "saved"


def save_producers_copy(message: str = "") -> str:
    """Save what a producer has kept of the job since it enqueued it, then fail where there is a message."""
    job = get_current_job()
    assert job is not None
    copy = Job.fetch(job.id, connection=job.connection, serializer=JSONSerializer)
    copy._status, copy.started_at, copy.worker_name = JobStatus.QUEUED, None, None
    copy.save()
    if message:
        raise ValueError(message)
    return "saved"


def own_state() -> list[Any]:
    """What the job's own copy and Redis say of the job that runs."""
    job = get_current_job()
    assert job is not None
    kept = Job.fetch(job.id, connection=job.connection, serializer=JSONSerializer)
    return [_state(job), _state(kept)]


def _state(job: Job) -> list[Any]:
    held = job.started_job_registry.get_job_count(cleanup=False)
    return [job.get_status(refresh=False), job.started_at is not None, job.worker_name, held]


def on_success_state(job: Job, connection: Redis, result: Any) -> None:
    kept = Job.fetch(job.id, connection=connection, serializer=JSONSerializer)
    connection.rpush("states", " ".join(str(getattr(each, "value", each)) for each in _state(kept)))


def on_success_saves(job: Job, connection: Redis, result: Any) -> None:
    job.meta["seen"] = "success"
    job.save()


def on_failure_saves(job: Job, connection: Redis, kind: Any, value: Any, trace: Any) -> None:
    job.meta["seen"] = "failure"
    job.save()


def save_in_handler(job: Job, kind: Any, value: Any, trace: Any) -> None:
    job.meta["handled"] = True
    job.save()


def linger() -> None:
    """Run for ever, in steps that a timeout can interrupt."""
    while True:
        time.sleep(0.01)


def no_json() -> object:
    return object()


def leave() -> None:
    raise SystemExit(3)


async def add_later(a: int, b: int) -> int:
    return a + b


def note_exception(job: Job, kind: Any, value: Any, trace: Any) -> None:
    job.connection.rpush("callbacks", f"handler:{job.id}:{kind.__name__}")


def note_and_end(job: Job, kind: Any, value: Any, trace: Any) -> bool:
    job.connection.rpush("callbacks", f"last handler:{job.id}:{kind.__name__}")
    return False


def glibc_malloc() -> dict[str, int]:
    """Count malloc's arenas; tell whether it maps what no gap has room for (bit 2 of the size before the block)."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.free(ctypes.c_void_p(libc.malloc(24 << 20)))
    block = ctypes.c_void_p(libc.malloc(12 << 20))
    assert block.value is not None
    size = ctypes.c_size_t.from_address(block.value - ctypes.sizeof(ctypes.c_size_t)).value
    libc.free(block)
    return {"arenas": _malloc_info(libc).count("<heap nr="), "mapped": size >> 1 & 1}


def _malloc_info(libc: ctypes.CDLL) -> str:
    libc.fopen.restype = ctypes.c_void_p
    with NamedTemporaryFile("r") as file:
        stream = ctypes.c_void_p(libc.fopen(file.name.encode(), b"w"))
        libc.malloc_info(0, stream)
        libc.fclose(stream)
        return file.read()


def arrow_allocator() -> str:
    import pyarrow

    return str(pyarrow.default_memory_pool().backend_name)


def spin_count() -> str | None:
    return os.environ.get("GOMP_SPINCOUNT")


def hang_in_c(where: str) -> None:
    """Wait for ever where no exception can be raised from outside."""
    if where == "sleep":
        time.sleep(10**6)
    elif where == "lock":
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()
    else:
        here, there = socket.socketpair()
        with there:
            here.recv(1)


def hang_on_success(job: Job, connection: Redis, result: Any) -> None:
    hang_in_c("sleep")


class OwnJob(Job):
    """What a user may give to `--job-class`."""


class OwnQueue(Queue):
    """What a user may give to `--queue-class`."""

    redis_queue_namespace_prefix = "own:queue:"


def lack(what: str) -> None:
    """Raise what would be a fault of the worker's surroundings in code of its own."""
    if what == "import":
        import not_installed_here  # noqa: F401
    raise MemoryError if what == "memory" else OSError(errno.EMFILE, "Too many open files")


def note_end(content: dict[str, Any]) -> None:
    """Keep what is told of a run's end, for the audit."""
    job = get_current_job()
    assert job is not None
    job.connection.rpush(f"tokenmill:told:{content['output']}", json.dumps(content))


def die_at_first(key: str) -> str:
    """Kill the process when called for the first time."""
    job = get_current_job()
    assert job is not None
    if job.connection.incr(key) == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return "done"


def give(kind: str, size: int) -> Any:
    """A value of about so many bytes as JSON."""
    if kind == "itself":
        value: list[Any] = []
        value.append(value)
        return value
    return {"text": "x" * size, "numbers": [1] * (size // 3), "nested": {"a": [["x" * size]]}}[kind]
