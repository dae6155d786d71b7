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

#: The messages of a chat, or the parts of a prompt. A part is {"type": "text", "text": ...} or {"type": "image",
#: "image": the bytes of a file}. The content of a message may be a list of such parts.
Parts = list[dict[str, Any]]

Prompt = str | list[int] | Parts


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt for the engine: exactly one of `prompt` and `messages` is set.

    sampling: the keyword arguments from which engine.request_params makes the parameters of this kind of request.
    chat_options: keyword arguments of engine.Engine.chat_token_ids.
    kind: what is asked: "generate", "score", "embed" or "classify".
    continued: token ids of an answer that was cut. The completion goes on after them.
    resumed: token ids that another worker has computed after `continued`, by the index of the sample.
    """

    prompt: Prompt | None
    messages: Parts | None
    sampling: Mapping[str, Any]
    chat_options: Mapping[str, Any] = field(default_factory=dict)
    kind: str = "generate"
    continued: Sequence[int] = ()
    resumed: Mapping[int, Sequence[int]] = field(default_factory=dict)

    def digest(self, clock: str) -> str:
        """Return a hash of everything that decides the answer, except the model.

        clock: the text that the chat template writes for the time. It is used only for a chat.
        """
        if self.messages is None:
            clock = ""  # a plain prompt has no template
        values = [self.prompt, self.messages, self.sampling, self.chat_options, self.kind, clock]
        text = json.dumps(values, default=_for_json, sort_keys=True)
        return blake2b(text.encode(), digest_size=16).hexdigest()


def _for_json(value: Any) -> Any:
    """Return a value that `json` can write, in place of a value that it cannot write.

    The bytes of a picture become their hash. A mapping that is no dict becomes a dict. A range of ids becomes a list.
    """
    if isinstance(value, bytes):
        return blake2b(value, digest_size=16).hexdigest()
    if isinstance(value, Mapping):
        return dict(value)
    return list(value)


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
    @property
    def lacks_adapter(self) -> bool: ...


class Task(abc.ABC):
    """A job for the engine. Its arguments have been checked. Nothing else has been read or checked yet."""

    #: Whether `open` and `result` use files. If so, the worker makes both calls in threads.
    blocking: bool = False

    #: Whether `open` takes memory for the rows of a file. If so, it may have to wait for that memory.
    reads_rows: ClassVar[bool] = False

    def task_to_open(self, context: JobContext) -> Task:
        """Return the task that is to be opened. Raises JobsError.

        This is the task itself, unless a subclass makes another task, for example from a file that it reads.
        """
        return self

    @abc.abstractmethod
    def open(self, context: JobContext) -> OpenTask:
        """Return the open task, which yields requests. Raises JobsError if the job cannot run; then nothing is open."""


class LateTask(Task):
    """A stand-in for a task that is made only when it is opened. make: returns that task. blocking: see Task."""

    def __init__(self, make: Callable[[JobContext], Task], blocking: bool = False) -> None:
        self._make = make
        self.blocking = blocking

    def task_to_open(self, context: JobContext) -> Task:
        """Make the task that this object stands for."""
        task = self._make(context)
        return task.task_to_open(context)  # this task, too, may be made only when it is opened

    def open(self, context: JobContext) -> OpenTask:
        """Make the task and open it."""
        return self.task_to_open(context).open(context)


class TimedTask(Task):
    """A task that fails if no worker has begun its job before the deadline.

    deadline: in any form that parse_deadline reads. A duration counts from the time at which the job was made.
    """

    def __init__(self, task: Task, deadline: Any) -> None:
        parse_deadline("deadline", deadline, now=0.0)  # checks the deadline's form
        self._task = task
        self._deadline = deadline
        self.blocking = task.blocking

    def task_to_open(self, context: JobContext) -> Task:
        """Make the task. Raises DeadlinePassed."""
        deadline = parse_deadline("deadline", self._deadline, context.created_at)
        if time.time() >= deadline and not self._has_begun(context):
            raise DeadlinePassed(utc_text(deadline))
        return self._task.task_to_open(context)

    @staticmethod
    def _has_begun(context: JobContext) -> bool:
        """Whether another worker has begun the job. If so, its journal holds answers, or tokens that were sent."""
        journal = context.journal
        if journal is None:
            return False
        return bool(journal.sent or journal.read())

    def open(self, context: JobContext) -> OpenTask:
        """Open the task. Raises DeadlinePassed."""
        return self.task_to_open(context).open(context)


class OpenTask(abc.ABC):
    """A job under way in the engine: yields requests, and takes their completions.

    `requests` and `deliver` are called alternately, then `result`, then `close`. `close` is called in any case.
    `inspect`, `result` and `close` may take long. All other methods are cheap, and are called in one thread.
    """

    @abc.abstractmethod
    def requests(self) -> Iterator[Request]:
        """Yield the requests lazily. They are numbered from 0, in the order in which they are pulled.

        A delivery may lead to further requests. These are yielded before all others, because their prefixes are still
        in the cache. If `has_more` is true after the last request, the worker calls this method again. The numbering
        then goes on.
        """

    @property
    def has_more(self) -> bool:
        """Whether another call of `requests` would yield something.

        The worker reads this after each delivery, once `requests` has ended.
        """
        return False

    @property
    def num_requests(self) -> int | None:
        """Return how many requests the task yields in all; None if that is unknown.

        A worker uses this number to decide when to claim further jobs.
        """
        return None

    @property
    def inspects(self) -> bool:
        """Whether `inspect` must be called before `deliver`."""
        return False

    def inspect(self, index: int, completions: Sequence[Completion]) -> None:  # noqa: B027 - most tasks inspect nothing
        """Check the completions of request `index` before they are delivered. Raises JobsError to fail the job.

        This method may be called in any thread, and for several requests at the same time. A call takes as long as the
        checks that it runs. The task keeps what a call finds for `deliver`, which may never be called.
        """

    @abc.abstractmethod
    def deliver(self, index: int, completions: Sequence[Completion]) -> None:
        """Take all completions of request `index`, one for each sample. Requests may be delivered in any order.

        If the engine refused a request, its one completion has the finish_reason "error" and an `error`.
        """

    def keep(self, tokens: Mapping[int, Mapping[int, Sequence[int]]]) -> Callable[[], None] | None:
        """Return a function that writes what another worker needs to go on with the job; None if nothing is new.

        The function may be called in any thread. If it raises, the next call of `keep` returns a function that writes
        everything that is not written yet.
        tokens: the tokens so far, by the index of the request and the index of the sample. Only requests without
        delivered completions have tokens here. If a request continues an answer, that answer's tokens are included.
        """
        return None

    def progress(self) -> dict[str, Any] | None:
        """Return the job's progress as a small JSON object; None if there is nothing to show.

        It is stored in the job's PROGRESS_FIELD.
        """
        return None

    @abc.abstractmethod
    def result(self) -> Any:
        """Return the job's JSON value, after the last completions were delivered. Raises JobsError to fail the job."""

    def close(self) -> None:  # noqa: B027 - most tasks hold nothing
        """Release files. May be called more than once."""
