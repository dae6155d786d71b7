"""JobEnvironment: what this worker lends to the jobs that it runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

from redis import Redis

from engine import InvalidRequest, RequestParams, SamplingParams, request_params
from jobs.common.keys import FORMAT
from jobs.context import JobContext, Lease
from jobs.context.job_journal import JobJournal, SentTokens, hash_of_owner
from jobs.context.served_model import PromptMeter
from jobs.errors import InvalidJob
from jobs.runs.end_notices import notify_failed
from jobs.tasks import Request
from worker.engine_thread.pictures import decode_pictures
from worker.store.records.claimed_job import ClaimedJob
from worker.store.records.text_piece import sent_tokens
from worker.traces.job_trace import Traces


@dataclass(frozen=True)
class JobEnvironment:
    """What a worker lends to all its jobs.

    shared_context: the context of jobs, without the values that differ from job to job.
    function_grace_s: seconds from a thread's interrupt until the thread is given up.
    """

    shared_context: JobContext
    function_grace_s: float = 5.0
    traces: Traces | None = None

    def context(self, claimed: ClaimedJob, connection: Redis) -> JobContext:
        """Return the context of one of our own jobs. connection: the client that the job's threads use."""
        return replace(
            self.shared_context,
            connection=connection,
            queue_name=claimed.queue_name,
            job_id=claimed.job_id,
            execution_id=claimed.execution_id,
            lease=Lease(claimed.job_id, claimed.execution_id),
            worker_name=claimed.worker_name,
            journal=self._journal(claimed, connection),
            trace=self._trace(claimed),
            creation=claimed.record.fields.get(b"created_at", b""),
        )

    def _trace(self, claimed: ClaimedJob) -> Mapping[str, str]:
        """Return the trace context for the jobs that this job enqueues; empty if this job is not traced."""
        if self.traces is None:
            return {}
        return self.traces.carrier(claimed.execution_id, claimed.record.meta)

    def _journal(self, claimed: ClaimedJob, connection: Redis) -> JobJournal:
        """Return the job's journal. Its owner is a text that identifies the job, the payload and the model."""
        payload_digest = blake2b(claimed.record.fields[b"data"], digest_size=16).hexdigest()
        created_at = claimed.record.fields.get(b"created_at", b"").decode(errors="replace")
        # The payload and the model's pin decide a prompt's tokens. The pin covers the model's tokenizer, its chat
        # template and the length at which `truncate_prompt_tokens` cuts.
        owner = f"{FORMAT} {claimed.job_id} {created_at} {payload_digest} {self.shared_context.model.pin}"
        tokens_sent: Sequence[SentTokens] = ()
        if claimed.pieces:
            tokens_sent = sent_tokens(claimed.pieces, hash_of_owner(owner))
        return JobJournal(
            connection,
            claimed.job_id,
            owner,
            stored=claimed.journal,
            execution_id=claimed.execution_id,
            sent=tokens_sent,
        )

    def notify_failed(self, connection: Redis, claimed: ClaimedJob, error: str) -> None:
        """Send the notices of a run's end, if this job's failure has ended the run. error: why the job failed."""
        notify_failed(connection, Lease(claimed.job_id, claimed.execution_id), error)


#: Kinds of requests whose tokens depend on the prompt and on `truncate_prompt_tokens`, but on no other sampling value.
_TEXT_KINDS = ("generate", "score")


def prompt_meter(engine: Any, block_size: int) -> PromptMeter:
    """Return a meter that counts the tokens of prompts. engine: an Engine, or a stand-in for one."""

    def token_ids(request: Request) -> Sequence[int]:
        """Return the tokens that the engine would read for a request. Raises InvalidJob."""
        try:
            params: RequestParams
            if request.kind in _TEXT_KINDS:
                truncation = request.sampling.get("truncate_prompt_tokens")
                params = SamplingParams(truncate_prompt_tokens=truncation)
            else:
                params = request_params(request.kind, request.sampling)
            if request.messages is None:
                prepared = engine.prepare(decode_pictures(request.prompt), params)
            else:
                messages = decode_pictures(request.messages)
                prepared = engine.prepare_chat(messages, params, **request.chat_options)
        except InvalidRequest as error:
            raise InvalidJob(str(error)) from None
        ids: Sequence[int] = prepared.token_ids
        return ids

    return PromptMeter(token_ids, engine.max_num_seqs, block_size)
