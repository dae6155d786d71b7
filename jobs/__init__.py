"""What producers enqueue: job functions for prompts and Parquet runs, and the `tokenmill` command line.

A producer needs only `rq` and these names as strings:

    Queue("prompts", connection=redis, serializer="json").enqueue("jobs.complete", "Hello", max_tokens=16)

Importing this package loads no torch, transformers, pyarrow or pydantic.
"""

from .api import (
    chat,
    classify,
    complete,
    embed,
    loglikelihood,
    rerank,
    score_parquet,
    score_shard,
    survey_parquet,
    verify_rows,
)
from .errors import JobsError

#: Tells this package from another one named `jobs`.
__tokenmill__ = True

__all__ = [
    "JobsError",
    "chat",
    "classify",
    "complete",
    "embed",
    "loglikelihood",
    "rerank",
    "score_parquet",
    "score_shard",
    "survey_parquet",
    "verify_rows",
]
