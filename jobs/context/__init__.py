"""Gives a running job what it needs from the process that runs it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from redis import Redis

from jobs.common.keys import executions_key
from jobs.common.stored import moment
from jobs.context.adapters import Adapters
from jobs.context.answers import AnswerMemo
from jobs.context.checks import Checks
from jobs.context.job_journal import JobJournal
from jobs.context.served_model import PromptMeter, ServedModel
from jobs.context.shared_files import ShardBytes, SharedFiles

#: The most bytes of a job's result, as JSON. Redis takes at most 512 MB, and a waiting client reads it whole.
MAX_RESULT_BYTES = 16 << 20


def accept_any_sampling(sampling: Mapping[str, Any]) -> None:
    """Accept any values. For processes that have no engine to check them."""


def never_interrupted() -> None:
    """Do nothing. For processes whose jobs are only interrupted by ending the process."""


@dataclass(frozen=True)
class Lease:
    """The mark in Redis that an execution still holds its job: `execution_id` is in the sorted set `key`."""

    job_id: str
    execution_id: str

    @property
    def key(self) -> str:
        """The key of RQ's registry of the job's executions."""
        return executions_key(self.job_id)


@dataclass(frozen=True)
class JobContext:
    """What the process that runs a job lends to it.

    connection: a client of Redis that only the calling thread uses.
    data_roots: absolute real paths, and paths in object stores.
    check_sampling: raises InvalidJob for sampling values that no request could use.
    files, answers, shard_bytes: shared by the shards of this process.
    check_interrupted: raises if the job was stopped or taken over, or is late. Long work calls it.
    lease: without it, writes are refused, because another worker has the job; None if nobody can take the job over.
    file_timeout_s: the time in which a file's store must answer.
    picture_reader: returns the function that reads a picture's file by its path.
    meter: returns a PromptMeter, and loads an engine if none is loaded; None if this process cannot count prompts.
    trace: W3C's trace context, for the meta of jobs that this job enqueues.
    journal: the journal of a job of prompts; None for other jobs.
    creation: when the job was made, as RQ has stored it.
    adapters: the adapters that the job's requests may name.
    """

    connection: Redis
    queue_name: str
    job_id: str
    execution_id: str
    data_roots: tuple[str, ...]
    model: ServedModel
    check_sampling: Callable[[Mapping[str, Any]], None] = accept_any_sampling
    files: SharedFiles = field(default_factory=SharedFiles)
    answers: AnswerMemo = field(default_factory=AnswerMemo)
    shard_bytes: ShardBytes = field(default_factory=ShardBytes)
    check_interrupted: Callable[[], None] = never_interrupted
    max_result_bytes: int = MAX_RESULT_BYTES
    lease: Lease | None = None
    file_timeout_s: float = 300.0
    picture_reader: Callable[["JobContext"], Callable[[str], bytes]] | None = None
    meter: Callable[[], PromptMeter] | None = None
    checks: Checks = field(default_factory=Checks)
    webhook_hosts: frozenset[str] = frozenset()
    allowed_functions: frozenset[str] = frozenset()
    worker_name: str = ""
    trace: Mapping[str, str] = field(default_factory=dict)
    journal: JobJournal | None = None
    creation: bytes = b""
    adapters: Adapters = field(default_factory=Adapters)

    @property
    def created_at(self) -> float | None:
        """Return when the job was made, in Unix seconds; None if that is unknown."""
        return moment(self.creation)
