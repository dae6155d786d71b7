"""What is noted of a job that is traced; where none is, nothing."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from engine import Completion
from worker.metrics.ended_job import EndedJob

NO_CARRIER: Mapping[str, str] = {}


@dataclass(frozen=True)
class TraceIds:
    """Which span is a job's. trace, span, parent: numbers of W3C's trace context; parent is None where it
    begins the trace. state: the trace's `tracestate`. carrier: for the meta of jobs that are its children."""

    trace: int
    span: int
    parent: int | None
    state: str
    carrier: Mapping[str, str]


@dataclass
class JobTrace:
    """A job that is traced, while this worker holds it. The I/O thread's. Times are Unix seconds.

    first_token_at: of the first of its completions; finished_at: of the last; None where there was none.
    prompt_tokens: of each request once, also where it has several samples.
    """

    ids: TraceIds
    claimed_at: float
    first_token_at: float | None = None
    finished_at: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    finish_reasons: set[str] = field(default_factory=set)

    def completed(self, completion: Completion) -> None:
        """The engine has finished a sample of a request of this job."""
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
    """Told of jobs; traces none. For a worker that is not to."""

    def begin(self, execution_id: str, meta: Any) -> JobTrace | None:
        """Trace a job that was claimed, perhaps. meta: the job's, as anybody may have written it."""
        return None

    def carrier(self, execution_id: str, meta: Any) -> Mapping[str, str]:
        """What a job passes on to those that it enqueues."""
        return NO_CARRIER

    def ended(self, trace: JobTrace, job: EndedJob, written_at: float) -> None:
        """A job that is traced has ended, and Redis has taken its end at `written_at`, in Unix seconds."""
