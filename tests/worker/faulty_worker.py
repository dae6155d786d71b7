"""Workers whose surroundings are at fault: modules, memory, file descriptors, a local disk."""

import errno
import os
import resource
from collections.abc import Callable
from typing import Any

from jobs.parquet.planning import planner
from jobs.parquet.shards.shard_work import ShardWork
from jobs.table import FileTask
from tests.worker.fake_engine import FakeEngineWorker
from worker.settings import WorkerSettings

FAULTS: dict[str, BaseException] = {
    "import": ImportError("cannot import name 'pq' from 'pyarrow'"),
    "memory": MemoryError(),
    "disk": OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
}


def exhaust_descriptors() -> None:
    """From here on this process cannot open anything more."""
    lowest_free = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest_free)
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (lowest_free, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    )


class FaultyWorker(FakeEngineWorker):
    """FakeEngineWorker that meets the fault FAULT ("descriptors", or one of FAULTS) in the step FAULTY_STEP:
    "open" or "result" of a shard, or "plan"."""

    def load_engine(self, settings: WorkerSettings) -> Any:
        fault, step = os.environ["FAULT"], os.environ["FAULTY_STEP"]
        owners = {
            "plan": (planner, "plan_run"),
            "open": (FileTask, "open"),
            "result": (ShardWork, "result"),
        }
        owner, name = owners[step]
        setattr(owner, name, _at_fault(getattr(owner, name), fault))
        return super().load_engine(settings)


def _at_fault(function: Callable[..., Any], fault: str) -> Callable[..., Any]:
    def faulty(*args: Any) -> Any:
        if fault != "descriptors":
            raise FAULTS[fault]
        exhaust_descriptors()
        return function(*args)

    return faulty
