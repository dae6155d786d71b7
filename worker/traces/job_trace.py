"""A job's trace while it runs, and a tracer that does nothing."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from engine import Completion
from worker.metrics.tally import EndedJob

NO_CARRIER: Mapping[str, str] = {}


@dataclass
class JobTrace:
    """The notes on a traced job, while this worker holds it. Times are Unix seconds.

    ids: what its tracer knows it by.
    first_token_at: of the first of its completions; finished_at: of the last; None if there was none.
    prompt_tokens: of each request once, also if it has several samples.
    """

    ids: Any
    claimed_at: float
    first_token_at: float | None = None
    finished_at: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    finish_reasons: set[str] = field(default_factory=set)

    def completed(self, completion: Completion) -> None:
        """Note a finished sample of one of this job's requests."""
        self.finish_reasons.add(completion.finish_reason)
        self.completion_tokens += len(completion.token_ids) - completion.num_continued
        if completion.index == 0:
            self.prompt_tokens += completion.num_prompt_tokens
            self.cached_tokens += completion.num_cached_tokens
        self.finished_at = time.time()
        if (told := completion.metrics) is not None and told.first_token_time is not None:
            first = self.finished_at - (time.monotonic() - told.first_token_time)
            self.first_token_at = min(first, self.first_token_at or first)


class Traces:
    """Traces no job: for a worker without traces."""

    def begin(self, execution_id: str, meta: Any) -> JobTrace | None:
        """Begin the trace of a claimed job, if it has one. meta: the job's, written by anybody."""
        return None

    def carrier(self, execution_id: str, meta: Any) -> Mapping[str, str]:
        """Return the trace context for the jobs that a job enqueues."""
        return NO_CARRIER

    def ended(self, trace: JobTrace, job: EndedJob, written_at: float) -> None:
        """Note that Redis has taken a traced job's end at `written_at`, in Unix seconds."""
