"""What a child does that lists prefixes of object stores: obstore keeps all of a listing, however long."""

import os
from collections.abc import Iterator
from typing import Any

import obstore
from obstore.exceptions import BaseError

from jobs.parquet.files.object_requests import opened_store
from sandbox.child import Worker

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
    """Return whether a prefix "has_any" object; of its "level" the folders and objects right in it, and when each of
    these was written, in nanoseconds."""
    if kind == "has_any":
        return next(iter(obstore.list(store, key or None, chunk_size=1)), None) is not None
    found = obstore.list_with_delimiter(store, key or None)
    objects = {each["path"]: int(each["last_modified"].timestamp() * 1e9) for each in found["objects"]}
    return {"folders": list(found["common_prefixes"]), "objects": objects}
