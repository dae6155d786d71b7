"""JobTrace: what is noted about a traced job while it runs. Traces: what sends the traces of a worker."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from engine import Completion
from worker.metrics.tally import EndedJob


@dataclass
class JobTrace:
    """What is noted about a traced job while this worker holds it. Times are Unix seconds.

    contexts: the trace contexts of the job, which only `Traces` reads.
    first_token_at: when the first token of any completion came; None before.
    finished_at: when the latest completion came; None before any has come.
    prompt_tokens: the tokens of all prompts. A request with several samples counts once.
    """

    contexts: Any
    claimed_at: float
    first_token_at: float | None = None
    finished_at: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    finish_reasons: set[str] = field(default_factory=set)

    def note_sample(self, completion: Completion) -> None:
        """Note a finished sample of one of this job's requests."""
        self.finish_reasons.add(completion.finish_reason)
        num_generated = len(completion.token_ids) - completion.num_continued
        self.completion_tokens += num_generated
        if completion.index == 0:  # all samples of a request have the same prompt
            self.prompt_tokens += completion.num_prompt_tokens
            self.cached_tokens += completion.num_cached_tokens

        self.finished_at = time.time()
        times = completion.metrics
        if times is not None and times.first_token_time is not None:
            # `first_token_time` is by the monotonic clock.
            since_first_token_s = time.monotonic() - times.first_token_time
            first_token_at = self.finished_at - since_first_token_s
            if self.first_token_at is None or first_token_at < self.first_token_at:
                self.first_token_at = first_token_at


class Traces(Protocol):
    """Sends the traces of a worker's jobs. A worker that traces no job has no such object."""

    def begin(self, execution_id: str, meta: Any) -> JobTrace | None:
        """Begin the trace of a claimed job. Returns None if the job is not traced. meta: of any type."""

    def carrier(self, execution_id: str, meta: Any) -> Mapping[str, str]:
        """Return the trace context that a job gives to the jobs it enqueues; empty if the job is not traced.

        execution_id, meta: the job's execution and meta.
        """

    def note_end(self, trace: JobTrace, job: EndedJob, written_at: float) -> None:
        """Note that a traced job's end was written to Redis at `written_at` (Unix seconds)."""
