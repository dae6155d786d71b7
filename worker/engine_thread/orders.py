"""Orders to the main thread's loop, and its reports: plain data in two queues."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine import Completion, RequestProgress
from jobs.tasks import Request


@dataclass(frozen=True, slots=True)
class Add:
    """Order: run a job's request on a lane."""

    request_id: str
    request: Request
    lane: int


@dataclass(frozen=True, slots=True)
class Abort:
    """Order: drop requests; nothing more is reported of them."""

    request_ids: Sequence[str]


@dataclass(frozen=True, slots=True)
class Look:
    """Order: a thread of the loop's own has prepared a prompt."""


@dataclass(frozen=True, slots=True)
class Tell:
    """Order: tell the tokens so far of all requests. stops: and take no further step."""

    stops: bool = False


@dataclass(frozen=True, slots=True)
class Halt:
    """Order: leave the loop."""


@dataclass(frozen=True, slots=True)
class Stepped:
    """Report: completions of one or more steps, and the engine's counters after them.

    started: ids of requests whose first sequence was scheduled. at: monotonic seconds when the last step began.
    progress: how far the requests in the batch are; None if there is no news. faults: requests that could not be
    prepared because of this worker.
    """

    completions: Sequence[Completion]
    stats: Mapping[str, Any]
    started: Sequence[str]
    at: float
    progress: Mapping[str, RequestProgress] | None = None
    faults: Sequence[tuple[str, BaseException]] = ()


@dataclass(frozen=True, slots=True)
class SoFar:
    """Report: the tokens of requests that are not completed, by their samples' indices."""

    samples: Mapping[str, Mapping[int, Sequence[int]]]


@dataclass(frozen=True, slots=True)
class EngineDied:
    """Report: a step raised; no request in the engine will be completed."""

    error: BaseException


Order = Add | Abort | Look | Tell | Halt
