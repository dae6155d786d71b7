"""Plain data: orders to the engine's loop, and reports from the loop. Orders and reports go through separate queues."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine import Completion, PartialText, RequestProgress
from jobs.tasks import Request


@dataclass(frozen=True, slots=True)
class Add:
    """Order: run a job's request. lane: the rank of the job's queue; 0 is the most urgent.

    is_followed: whether a client reads the text as it grows.
    """

    request_id: str
    request: Request
    lane: int
    is_followed: bool = False


@dataclass(frozen=True, slots=True)
class Abort:
    """Order: drop requests. Nothing more is reported about them."""

    request_ids: Sequence[str]


@dataclass(frozen=True, slots=True)
class Wake:
    """Order: begin a turn of the loop, because a thread has prepared a prompt."""


@dataclass(frozen=True, slots=True)
class ReportTokens:
    """Order: report the tokens that each request has so far.

    stops: whether the engine then stops. It finishes the step that it has launched, and launches no other.
    """

    stops: bool = False


@dataclass(frozen=True, slots=True)
class Halt:
    """Order: leave the loop."""


@dataclass(frozen=True, slots=True)
class Stepped:
    """Report: completions of one or more steps, and the engine's counters after them.

    started: the ids of the requests that were scheduled for the first time.
    at: monotonic seconds when the last step began.
    progress: how far the requests in the batch are; None if this report does not say.
    faults: the ids of requests that this worker could not prepare, each with its error.
    """

    completions: Sequence[Completion]
    stats: Mapping[str, Any]
    started: Sequence[str]
    at: float
    progress: Mapping[str, RequestProgress] | None = None
    faults: Sequence[tuple[str, BaseException]] = ()


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """Report: the token ids that each request in the engine has so far, by request id and sample index."""

    samples: Mapping[str, Mapping[int, Sequence[int]]]


@dataclass(frozen=True, slots=True)
class Texts:
    """Report: the text so far of each request that a client follows, by request id and sample index."""

    samples: Mapping[str, Mapping[int, PartialText]]


@dataclass(frozen=True, slots=True)
class EngineDied:
    """Report: the engine raised this error. None of the engine's requests will be completed."""

    error: BaseException


Order = Add | Abort | Wake | ReportTokens | Halt
