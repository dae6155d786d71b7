"""What jobs on this worker get and are limited by."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from redis import Redis

from engine import InvalidRequest
from jobs.common.rq_jobs import executions_key
from jobs.context import MAX_RESULT_BYTES, JobContext, Lease
from jobs.context.answer_memo import AnswerMemo
from jobs.context.checks.processes import Checks
from jobs.context.prompt_meter import PromptMeter
from jobs.context.served_model import ServedModel
from jobs.context.shard_bytes import ShardBytes
from jobs.context.shared_files import SharedFiles
from jobs.errors import InvalidJob
from jobs.runs.end_notices import tell_failed
from worker.store.records.claimed_job import ClaimedJob
from worker.threads.interrupts import check_interrupted
from worker.traces.job_trace import Traces


@dataclass(frozen=True)
class JobEnvironment:
    """The same for all jobs of a worker. See `JobContext` for most of it."""

    data_roots: tuple[str, ...]
    model: ServedModel
    check_sampling: Callable[[Any], Any]
    function_grace_s: float = 5.0
    """Seconds from its interrupt to when a thread is given up."""
    file_timeout_s: float = 300.0
    """See `TaskFiles`."""
    files: SharedFiles = field(default_factory=SharedFiles)
    answers: AnswerMemo = field(default_factory=AnswerMemo)
    max_result_bytes: int = MAX_RESULT_BYTES
    shard_bytes: ShardBytes = field(default_factory=ShardBytes)
    meter: Callable[[], PromptMeter] | None = None
    checks: Checks = field(default_factory=Checks)
    webhook_hosts: frozenset[str] = frozenset()
    allowed_functions: frozenset[str] = frozenset()
    traces: Traces = field(default_factory=Traces)

    def context(self, claimed: ClaimedJob, connection: Redis) -> JobContext:
        """What one of our own jobs is lent. connection: for the threads in which it works."""
        return JobContext(
            connection=connection,
            queue_name=claimed.queue_name,
            job_id=claimed.job_id,
            execution_id=claimed.execution_id,
            data_roots=self.data_roots,
            model=self.model,
            check_sampling=self.check_sampling,
            files=self.files,
            answers=self.answers,
            shard_bytes=self.shard_bytes,
            check_interrupted=check_interrupted,
            max_result_bytes=self.max_result_bytes,
            lease=_lease(claimed),
            file_timeout_s=self.file_timeout_s,
            meter=self.meter,
            checks=self.checks,
            webhook_hosts=self.webhook_hosts,
            allowed_functions=self.allowed_functions,
            worker_name=claimed.worker_name,
            trace=self.traces.carrier(claimed.execution_id, claimed.record.meta),
        )

    def tell_failed(self, connection: Redis, claimed: ClaimedJob, error: str) -> None:
        """Tell whom a run wants told of its end that it has failed, where it has with this job."""
        tell_failed(connection, claimed.job_id, _lease(claimed), error)


def _lease(claimed: ClaimedJob) -> Lease:
    return Lease(executions_key(claimed.job_id), claimed.execution_id)


def prompt_meter(engine: Any, max_num_seqs: int, block_size: int) -> PromptMeter:
    """What an engine makes of prompts. engine: an EngineLike, or an Engine."""

    def token_ids(
        prompt: str | None, messages: list[dict[str, Any]] | None, options: Mapping[str, Any]
    ) -> Sequence[int]:
        try:
            given = prompt if messages is None else engine.chat_token_ids(messages, **options)
            found: Sequence[int] = engine.prepare(
                given, **({} if messages is not None else options)
            ).token_ids
        except InvalidRequest as error:
            raise InvalidJob(str(error)) from None
        return found

    return PromptMeter(token_ids, max_num_seqs, block_size, engine.stats().num_blocks)
