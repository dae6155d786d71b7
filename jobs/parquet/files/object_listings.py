"""Listings of object stores, each made by a process apart, which a store cannot fill or keep for ever."""

from __future__ import annotations

import os
from typing import Any

from obstore import exceptions

from jobs.parquet.files.store_errors import StoreRefused
from sandbox import ChildFailed, Limits, Pool

_TASK = "jobs.parquet.files.listing_child:list_prefix"

#: What a listing may take: some thousand bytes for each object.
MEMORY_BYTES = 512 << 20

#: What obstore reads of the environment.
_VARIABLES = ("AWS_", "GOOGLE_", "AZURE_")


#: Of their own: these children, alone of all, hold a store's credentials, as obstore asks the store itself.
_pool = Pool()


def listed(kind: str, folder: str, timeout_s: float) -> Any:
    """Return what a listing of a kind tells of a prefix, a path as run_path returns it.

    Raises what obstore does, and StoreRefused for a listing without an end.
    """
    scheme, _, rest = folder.partition("://")
    bucket, _, key = rest.partition("/")
    variables = {name: value for name, value in os.environ.items() if name.startswith(_VARIABLES)}
    question = {
        "kind": kind, "scheme": scheme, "bucket": bucket, "key": key, "timeout_s": timeout_s,
        "environment": variables,
    }  # fmt: skip
    try:
        reply, _ = _pool.call(lambda child: child.ask(_TASK, question, Limits(timeout_s, MEMORY_BYTES)))
    except ChildFailed as error:
        raise StoreRefused(folder, f"its listing {error}") from None
    if "raised" in reply:
        raise getattr(exceptions, reply["raised"], ValueError)(reply["text"])
    return reply["found"]
