"""The process that lists prefixes of object stores: for each question it writes one reply.

A listing is as long as a store makes it, and obstore keeps all of it. This process may take so much and no
more, and whoever asks it ends it after a time.
"""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import obstore
from obstore.exceptions import BaseError, InvalidPathError

from .object_requests import opened_store

#: What a listing may take: some thousand bytes for each object.
MEMORY_BYTES = 512 << 20

#: Objects that a listing tells of at a time; and those below a folder that it passes over to list the folder.
_LISTED, _MAX_BELOW = 1000, 20_000


def main(fd: int) -> None:
    """Answer through the file descriptor until nobody asks any more."""
    pipe = Connection(fd)
    _limit_memory()
    pipe.send_bytes(b"{}")
    environment: dict[str, str] = {}
    while True:
        try:
            question = json.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            return
        if question["environment"] != environment:
            opened_store.cache_clear()
            for name in environment:
                os.environ.pop(name, None)
            environment = question["environment"]
            os.environ.update(environment)
        pipe.send_bytes(json.dumps(_reply(question)).encode())


def _reply(question: Mapping[str, Any]) -> dict[str, Any]:
    store = opened_store(question["scheme"], question["bucket"], question["timeout_s"])
    try:
        return {"found": listing(store, question["kind"], question["key"])}
    except (BaseError, FileNotFoundError, ValueError) as error:
        return {"raised": type(error).__name__, "text": str(error)}


def listing(store: Any, kind: str, key: str) -> Any:
    """Return what a listing tells of a prefix: the "level" right in it, the "names" there, or "has_any"."""
    return _KINDS[kind](store, key)


def _level(store: Any, key: str) -> dict[str, Any]:
    """Return the folders and objects right in a prefix, and when each object was written, in nanoseconds."""
    found = obstore.list_with_delimiter(store, key or None)
    objects = {each["path"]: int(each["last_modified"].timestamp() * 1e9) for each in found["objects"]}
    return {"folders": list(found["common_prefixes"]), "objects": objects}


def _names(store: Any, key: str) -> list[str] | None:
    """Return the names in a prefix; None where they must be listed at once: where more is in its folders than
    is to be listed, or an object's path is one that obstore does not take, such as `a//b`."""
    start, names, below = len(key) + 1 if key else 0, set(), 0
    with suppress(InvalidPathError):
        for found in obstore.list(store, key or None, chunk_size=_LISTED):
            for each in found:
                name, _, rest = each["path"][start:].partition("/")
                if name:  # else it stands for the folder itself, as consoles make one
                    names.add(name)
                below += rest != ""
            if below > _MAX_BELOW:
                return None
        return list(names)
    return None


def _has_any(store: Any, key: str) -> bool:
    return next(iter(obstore.list(store, key or None, chunk_size=1)), None) is not None


_KINDS: dict[str, Callable[[Any, str], Any]] = {"level": _level, "names": _names, "has_any": _has_any}


def _limit_memory() -> None:
    """Allow MEMORY_BYTES more than there are now, where the system counts them, and no file of them all."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError):
        pages = int(Path("/proc/self/statm").read_text().split()[5])
        most = pages * resource.getpagesize() + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
