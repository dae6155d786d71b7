"""Defines what a job may use of the process that runs it."""

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

#: The most bytes of a job's result as JSON. Redis takes at most 512 MB, and a client reads the whole result at once.
MAX_RESULT_BYTES = 16 << 20


def accept_any_sampling(sampling: Mapping[str, Any]) -> None:
    """Accept any values. Used in processes that have no engine to check sampling values."""


def never_interrupted() -> None:
    """Do nothing. Used in processes whose jobs can only be interrupted by ending the process."""


@dataclass(frozen=True)
class Lease:
    """The right of an execution to write for its job, as long as `execution_id` is in the sorted set `key`."""

    job_id: str
    execution_id: str

    @property
    def key(self) -> str:
        """Return the key of RQ's registry of the job's executions."""
        return executions_key(self.job_id)


@dataclass(frozen=True)
class JobContext:
    """What a job may use of the process that runs it.

    connection: a client of Redis that only the calling thread uses.
    data_roots: the folders below which a job may use files: absolute real paths, and paths in object stores.
    model: the model that the process serves.
    check_sampling: raises InvalidJob for sampling values that no request could use.
    files, answers, shard_bytes: the open files, the known answers, and the count of the bytes of prompts. All shards of
    the process share these.
    check_interrupted: raises if the job was stopped, was taken over by another worker, or has run too long. Long work
    calls it again and again.
    lease: the right to write for the job; None if no other worker can take over the job.
    file_timeout_s: the seconds in which a store of files must answer.
    picture_reader: returns a function that reads a picture's file by its path; None if no paths are read here.
    meter: returns a PromptMeter, and loads an engine if none is loaded; None if this process cannot count tokens.
    webhook_hosts, allowed_functions: what the operator allows jobs to call.
    trace: W3C's trace context, for the meta of jobs that this job enqueues.
    journal: the journal of a job of prompts; None for other jobs.
    creation: the time at which the job was made, as RQ has stored it.
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
