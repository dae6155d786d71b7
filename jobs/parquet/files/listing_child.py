"""What a child does that lists prefixes of object stores.

A listing is as long as a store makes it, and obstore keeps all of it.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import obstore
from obstore.exceptions import BaseError, InvalidPathError

from jobs.parquet.files.object_requests import opened_store
from sandbox.child import Worker

#: Objects that a listing tells of at a time; and those below a folder that it passes over to list the folder.
_LISTED, _MAX_BELOW = 1000, 20_000


_environment: dict[str, str] = {}


def list_prefix(worker: Worker) -> Iterator[dict[str, Any]]:
    """List a prefix as a question says, by the variables of the worker that it brings."""
    global _environment
    question = worker.question
    if question["environment"] != _environment:
        opened_store.cache_clear()
        for name in _environment:
            os.environ.pop(name, None)
        _environment = question["environment"]
        os.environ.update(_environment)
    store = opened_store(question["scheme"], question["bucket"], question["timeout_s"])
    try:
        yield {"found": listing(store, question["kind"], question["key"])}
    except (BaseError, FileNotFoundError, ValueError) as error:
        yield {"raised": type(error).__name__, "text": str(error)}


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
