"""What jobs on this worker get and are limited by."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from redis import Redis

from engine import InvalidRequest
from jobs.common.rq_jobs import executions_key
from jobs.context import JobContext, Lease
from jobs.context.served_model import PromptMeter
from jobs.errors import InvalidJob
from jobs.runs.end_notices import tell_failed
from worker.store.records.claimed_job import ClaimedJob
from worker.traces.job_trace import Traces


@dataclass(frozen=True)
class JobEnvironment:
    """What is the same for all jobs of a worker.

    lent: the context of a job, but for what that job alone decides.
    function_grace_s: seconds from its interrupt to when a thread is given up.
    """

    lent: JobContext
    function_grace_s: float = 5.0
    traces: Traces = field(default_factory=Traces)

    def context(self, claimed: ClaimedJob, connection: Redis) -> JobContext:
        """What one of our own jobs is lent. connection: for the threads in which it works."""
        return replace(
            self.lent,
            connection=connection,
            queue_name=claimed.queue_name,
            job_id=claimed.job_id,
            execution_id=claimed.execution_id,
            lease=_lease(claimed),
            worker_name=claimed.worker_name,
            trace=self.traces.carrier(claimed.execution_id, claimed.record.meta),
        )

    def tell_failed(self, connection: Redis, claimed: ClaimedJob, error: str) -> None:
        """Tell whom a run wants told of its end that it has failed, where it has with this job."""
        tell_failed(connection, claimed.job_id, _lease(claimed), error)


def _lease(claimed: ClaimedJob) -> Lease:
    return Lease(executions_key(claimed.job_id), claimed.execution_id)


def prompt_meter(engine: Any, max_num_seqs: int, block_size: int) -> PromptMeter:
    """What an engine makes of prompts. engine: an Engine, or what stands in for one."""

    def token_ids(
        prompt: str | None, messages: list[dict[str, Any]] | None, options: Mapping[str, Any]
    ) -> Sequence[int]:
        try:
            given = prompt if messages is None else engine.chat_token_ids(messages, **options)
            found: Sequence[int] = engine.prepare(given, **({} if messages is not None else options)).token_ids
        except InvalidRequest as error:
            raise InvalidJob(str(error)) from None
        return found

    return PromptMeter(token_ids, max_num_seqs, block_size, engine.stats().num_blocks)
