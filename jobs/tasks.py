"""The contract between a job that needs the engine and the worker that drives it."""

from __future__ import annotations

import abc
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, ClassVar, Protocol

from jobs.common.display import utc_text
from jobs.context import JobContext
from jobs.context.deadlines import parse_deadline
from jobs.errors import DeadlinePassed

Parts = list[dict[str, Any]]
"""Messages of a chat, or parts of a prompt: {"type": "text", "text": ...}, and for a picture {"type": "image", "image":
the bytes of its file}, both also in the contents of messages."""

Prompt = str | list[int] | Parts


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt for the engine: exactly one of `prompt` and `messages` is set.

    sampling: keyword arguments of what engine.request_params makes for this kind: engine.SamplingParams, ScoringParams,
    PoolingParams or ClassParams. chat_options: those of engine.Engine.chat_token_ids beside the messages. continued,
    resumed: as of engine.Engine.add: token ids of an answer that was cut and goes on, and those that its samples had
    behind them on another worker, by index.
    """

    prompt: Prompt | None
    messages: Parts | None
    sampling: Mapping[str, Any]
    chat_options: Mapping[str, Any] = field(default_factory=dict)
    kind: str = "generate"
    continued: Sequence[int] = ()
    resumed: Mapping[int, Sequence[int]] = field(default_factory=dict)

    def digest(self, now: str) -> str:
        """Return a hash of everything that decides the answer, but for the model.

        now: the text that the chat template writes for the time.
        """
        clock = now if self.messages is not None else ""
        asked = [self.prompt, self.messages, self.sampling, self.chat_options, self.kind, clock]
        text = json.dumps(asked, default=_hashed, sort_keys=True)
        return blake2b(text.encode(), digest_size=16).hexdigest()


def _hashed(value: Any) -> Any:
    """Return JSON in place of a value that JSON does not have: a picture's bytes, a mapping, a range of ids."""
    if isinstance(value, bytes):
        return blake2b(value, digest_size=16).hexdigest()
    return dict(value) if isinstance(value, Mapping) else list(value)


class Logprob(Protocol):
    """What this package reads of engine.Logprob."""

    @property
    def logprob(self) -> float: ...
    @property
    def rank(self) -> int: ...
    @property
    def decoded_token(self) -> str: ...
    @property
    def partial_bytes(self) -> bytes | None: ...


class LogLikelihood(Protocol):
    """What this package reads of engine.LogLikelihood."""

    @property
    def logprob(self) -> float: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def is_greedy(self) -> bool: ...


class Completion(Protocol):
    """What this package reads of engine.Completion."""

    @property
    def index(self) -> int: ...
    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def text(self) -> str: ...
    @property
    def finish_reason(self) -> str: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def num_cached_tokens(self) -> int: ...
    @property
    def error(self) -> str | None: ...
    @property
    def num_continued(self) -> int: ...
    @property
    def logprobs(self) -> Sequence[Mapping[int, Logprob]] | None: ...
    @property
    def prompt_logprobs(self) -> Sequence[Mapping[int, Logprob] | None] | None: ...
    @property
    def reasoning(self) -> str | None: ...
    @property
    def tool_calls(self) -> Sequence[Mapping[str, str]] | None: ...
    @property
    def tool_call_error(self) -> str | None: ...
    @property
    def prompt_text(self) -> str | None: ...
    @property
    def prompt_tokens(self) -> Sequence[str] | None: ...
    @property
    def embedding(self) -> Sequence[float] | None: ...
    @property
    def loglikelihoods(self) -> Sequence[LogLikelihood] | None: ...
    @property
    def class_scores(self) -> Mapping[str, float] | None: ...


class Task(abc.ABC):
    """One engine job whose arguments are sound and of which nothing has been read or checked beside them."""

    #: True when opening it and asking for its result touch files: the worker makes both calls in threads.
    blocking: bool = False

    #: True when opening it takes memory for the rows of a file, for which it may have to wait.
    reads_rows: ClassVar[bool] = False

    def made(self, context: JobContext) -> Task:
        """Return the task itself, once what it is made from has been read. Raises JobsError."""
        return self

    @abc.abstractmethod
    def open(self, context: JobContext) -> OpenTask:
        """Get ready to yield requests. Raises JobsError when the job cannot run, and leaves nothing open."""


class LateTask(Task):
    """A task of which `make` tells once it is opened what there is to ask. blocking: whether that touches files."""

    def __init__(self, make: Callable[[JobContext], Task], blocking: bool = False) -> None:
        self._make, self.blocking = make, blocking

    def made(self, context: JobContext) -> Task:
        """Make the task, and what that one is made from."""
        return self._make(context).made(context)

    def open(self, context: JobContext) -> OpenTask:
        """Make the task and open it."""
        return self.made(context).open(context)


class TimedTask(Task):
    """A task that is not begun after its deadline. deadline: as parse_deadline takes it, from the job's making on."""

    def __init__(self, task: Task, deadline: Any) -> None:
        parse_deadline("deadline", deadline, 0.0)
        self._task = task
        self._deadline = deadline
        self.blocking = task.blocking

    def made(self, context: JobContext) -> Task:
        """Make the task. Raises DeadlinePassed."""
        deadline = parse_deadline("deadline", self._deadline, context.created_at)
        if time.time() >= deadline:
            raise DeadlinePassed(utc_text(deadline))
        return self._task.made(context)

    def open(self, context: JobContext) -> OpenTask:
        """Open the task. Raises DeadlinePassed."""
        return self.made(context).open(context)


class OpenTask(abc.ABC):
    """An engine job under way: a lazy stream of requests and a place to deliver completions.

    The order of calls is requests and deliver interleaved, then result, then close. Close always comes,
    whatever happened before. All but inspect, result and close are cheap and called from one thread.
    """

    @abc.abstractmethod
    def requests(self) -> Iterator[Request]:
        """Yield the requests lazily; they are numbered 0.. in the order pulled.

        A stream ends only once it has yielded all that deliveries have led to by then; best before the rest, while its
        prefixes are in the cache. Called again where it has ended and the task `has_more`; the numbers go on.
        """

    @property
    def has_more(self) -> bool:
        """Whether `requests`, called now, would yield some; looked at after each delivery once the stream has ended."""
        return False

    @property
    def num_requests(self) -> int | None:
        """Return how many requests the task yields in all; None if unknown. A worker that knows it claims in time."""
        return None

    @property
    def inspects(self) -> bool:
        return False

    def inspect(self, index: int, completions: Sequence[Completion]) -> None:  # noqa: B027 - most look not
        """Look at what request `index` got, before `deliver` takes it. Raises JobsError to fail the job.

        Called in any thread, for several requests at once, and may take as long as Checks may; what it finds
        is kept for `deliver`, which may never come.
        """

    @abc.abstractmethod
    def deliver(self, index: int, completions: Sequence[Completion]) -> None:
        """Take all samples of request `index`, in any order of indices.

        A request that the engine refused arrives as one completion with finish_reason "error" and `error`.
        """

    def keep(self, so_far: Mapping[int, Mapping[int, Sequence[int]]]) -> Callable[[], None] | None:
        """Return a function that writes, in any thread, what another worker needs to go on; None if nothing is new.

        so_far: the tokens of requests that were sent and not delivered, by index and sample, with those that they
        continue. Where what it returned raises, the next call, which comes afterwards, has all that was new.
        """
        return None

    def progress(self) -> dict[str, Any] | None:
        """Return how far the job is, as small JSON, for `PROGRESS_FIELD`; None when it has no progress to show."""
        return None

    @abc.abstractmethod
    def result(self) -> Any:
        """Return the job's JSON value, once every request was delivered. Raises JobsError to fail the job."""

    def close(self) -> None:  # noqa: B027 - most tasks hold nothing
        """Release files; may be called more than once."""
