"""The context and limits of jobs on this worker."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

from redis import Redis

from engine import InvalidRequest
from jobs.common.keys import FORMAT
from jobs.common.rq_jobs import executions_key
from jobs.context import JobContext, Lease
from jobs.context.job_journal import JobJournal
from jobs.context.served_model import PromptMeter
from jobs.errors import InvalidJob
from jobs.runs.end_notices import tell_failed
from jobs.tasks import Parts, Prompt
from worker.engine_thread.pictures import decoded
from worker.store.records.claimed_job import ClaimedJob
from worker.traces.job_trace import Traces


@dataclass(frozen=True)
class JobEnvironment:
    """The same context for all jobs of a worker.

    lent: the context of a job, but for its own parts.
    function_grace_s: seconds from its interrupt to when a thread is given up.
    """

    lent: JobContext
    function_grace_s: float = 5.0
    traces: Traces = field(default_factory=Traces)

    def context(self, claimed: ClaimedJob, connection: Redis) -> JobContext:
        """Return the context of one of our own jobs. connection: for the threads in which it works."""
        return replace(
            self.lent,
            connection=connection,
            queue_name=claimed.queue_name,
            job_id=claimed.job_id,
            execution_id=claimed.execution_id,
            lease=_lease(claimed),
            worker_name=claimed.worker_name,
            journal=self._journal(claimed, connection),
            trace=self.traces.carrier(claimed.execution_id, claimed.record.meta),
        )

    def _journal(self, claimed: ClaimedJob, connection: Redis) -> JobJournal:
        payload = blake2b(claimed.record.fields[b"data"], digest_size=16).hexdigest()
        created_at = claimed.record.fields.get(b"created_at", b"").decode(errors="replace")
        # Texts stand for their tokens: the model's identity has its tokenizer and template, its pin the length at which
        # `truncate_prompt_tokens` cuts.
        whose = f"{FORMAT} {claimed.job_id} {created_at} {payload} {self.lent.model.pin}"
        lease = _lease(claimed)
        return JobJournal(connection, claimed.job_id, whose, claimed.left, (lease.key, lease.member))

    def tell_failed(self, connection: Redis, claimed: ClaimedJob, error: str) -> None:
        """Tell the receivers of a run's end that it has failed, if it has with this job."""
        tell_failed(connection, claimed.job_id, _lease(claimed), error)


def _lease(claimed: ClaimedJob) -> Lease:
    return Lease(executions_key(claimed.job_id), claimed.execution_id)


def prompt_meter(engine: Any, max_num_seqs: int, block_size: int) -> PromptMeter:
    """Return a meter of prompts by the engine, or a stand-in for one."""

    def token_ids(prompt: Prompt | None, messages: Parts | None, options: Mapping[str, Any]) -> Sequence[int]:
        try:
            prepare, given = (engine.prepare, prompt) if messages is None else (engine.prepare_chat, messages)
            found: Sequence[int] = prepare(decoded(given), **options).token_ids
        except InvalidRequest as error:
            raise InvalidJob(str(error)) from None
        return found

    return PromptMeter(token_ids, max_num_seqs, block_size)
