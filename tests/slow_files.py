"""Files and stores that answer slowly, in workers too: `SLOW_FILES_S=0.05 python -m pytest tests/jobs tests/worker`."""

import functools
import os
from collections.abc import Callable
from time import sleep  # as it is now: tests put others in its place
from typing import Any

from jobs.parquet.files.local_files import LocalFiles


def slow_down() -> None:
    """Have each call of a filesystem, and each request to a store, take that much longer from here on."""
    seconds = float(os.environ.get("SLOW_FILES_S", "0"))
    if not seconds:
        return
    for name in (name for name in vars(LocalFiles) if not name.startswith("_")):
        setattr(LocalFiles, name, slow(getattr(LocalFiles, name), seconds))
    try:
        from jobs.parquet.files.object_files import ObjectFiles
    except ImportError:  # obstore is not installed
        return
    ObjectFiles._make = slow(ObjectFiles._make, seconds)  # type: ignore[method-assign]


def slow(call: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    """Return a call that takes that much longer."""

    @functools.wraps(call)
    def late(*args: Any, **kwargs: Any) -> Any:
        sleep(seconds)
        return call(*args, **kwargs)

    return late
