"""The orders to the main thread's loop, and its reports. They are plain data in two queues."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine import Completion, PartialText, RequestProgress
from jobs.tasks import Request


@dataclass(frozen=True, slots=True)
class Add:
    """Order: run a job's request on a lane. is_followed: somebody reads its text as it grows."""

    request_id: str
    request: Request
    lane: int
    is_followed: bool = False


@dataclass(frozen=True, slots=True)
class Abort:
    """Order: drop requests. Nothing more is reported about them."""

    request_ids: Sequence[str]


@dataclass(frozen=True, slots=True)
class Look:
    """Order: look at the intake, because a thread has prepared a prompt."""


@dataclass(frozen=True, slots=True)
class Tell:
    """Order: report the tokens that each request has so far. stops: take no further step after the report."""

    stops: bool = False


@dataclass(frozen=True, slots=True)
class Halt:
    """Order: leave the loop."""


@dataclass(frozen=True, slots=True)
class Stepped:
    """Report: completions of one or more steps, and the engine's counters after them.

    started: the ids of requests whose first sequence was scheduled.
    at: monotonic seconds when the last step began.
    progress: how far the requests in the batch are; None if that is not reported this time.
    faults: the ids of requests that this worker could not prepare, with the errors.
    """

    completions: Sequence[Completion]
    stats: Mapping[str, Any]
    started: Sequence[str]
    at: float
    progress: Mapping[str, RequestProgress] | None = None
    faults: Sequence[tuple[str, BaseException]] = ()


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """Report: the token ids that all requests in the engine have, by request id and sample index."""

    samples: Mapping[str, Mapping[int, Sequence[int]]]


@dataclass(frozen=True, slots=True)
class Texts:
    """Report: the texts of followed requests as far as they have grown, by request id and sample index."""

    samples: Mapping[str, Mapping[int, PartialText]]


@dataclass(frozen=True, slots=True)
class EngineDied:
    """Report: the engine raised. No request in it will be completed."""

    error: BaseException


Order = Add | Abort | Look | Tell | Halt
