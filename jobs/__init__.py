"""What producers enqueue: job functions for prompts and Parquet runs, and the `tokenmill` command line.

A producer needs only `rq` and these names as strings:

    Queue("prompts", connection=redis, serializer="json").enqueue("jobs.complete", "Hello", max_tokens=16)

Runs are made and awaited by `jobs.submit` and `jobs.run`, which no worker calls (jobs/client.py). Importing
this package loads no torch, transformers, pyarrow or pydantic.
"""

from typing import TYPE_CHECKING, Any

from jobs.api import (
    chat,
    classify,
    classify_text,
    complete,
    embed,
    loglikelihood,
    post_run_end,
    rerank,
    score_parquet,
    score_shard,
    survey_parquet,
    verify_rows,
)
from jobs.errors import JobsError

if TYPE_CHECKING:
    from jobs.client import Run, run, submit

#: Tells this package from another one named `jobs`.
__tokenmill__ = True

__all__ = [
    "JobsError",
    "Run",
    "chat",
    "classify",
    "classify_text",
    "complete",
    "embed",
    "loglikelihood",
    "post_run_end",
    "rerank",
    "run",
    "score_parquet",
    "score_shard",
    "submit",
    "survey_parquet",
    "verify_rows",
]

# RQ enqueues a function by the name of its module, and workers know these by ours.
for _name in __all__:
    if (_function := globals().get(_name)) and _function.__module__ == f"{__name__}.api":
        _function.__module__ = __name__


def __getattr__(name: str) -> Any:
    """Import what makes runs when it is asked for: a check's process, for one, needs no rq."""
    if name not in ("Run", "run", "submit"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from jobs import client

    return getattr(client, name)
