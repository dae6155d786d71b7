"""The task of `jobs.complete` and `jobs.chat`: prompts in the job, answers in its result."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from .context import JobContext
from .prompts import check_choices, parse_messages, parse_prompts, parse_sampling
from .responses import Answers, chat_completion, check_answers, text_completion
from .served_model import parse_model
from .tasks import Completion, Request, Task


class Respond(Protocol):
    """Builds the job's result, see responses.py."""

    def __call__(self, answers: Answers, *, job_id: str, model: str, created: int) -> dict[str, Any]: ...


class PromptTask(Task):
    """Holds its requests and answers in memory: a job is never larger than what Redis took."""

    blocking = False

    def __init__(
        self,
        requests: Sequence[Request],
        respond: Respond,
        model: str | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """model: what the job asks for; None takes whichever is served."""
        self._requests = requests
        self._respond = respond
        self._model = model
        self._clock = clock
        self._answers: list[Sequence[Completion]] = [()] * len(requests)
        self._context: JobContext | None = None

    def open(self, context: JobContext) -> None:
        """Raise ModelNotServed when the job asks for another model than the one served here."""
        context.model.check_asked_for(self._model)
        self._context = context

    def requests(self) -> Iterator[Request]:
        return iter(self._requests)

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    def deliver(self, index: int, completions: Sequence[Completion]) -> None:
        self._answers[index] = sorted(completions, key=lambda sample: sample.index)

    def result(self) -> dict[str, Any]:
        """Return OpenAI's response shape. Raises RequestFailed when a request was refused."""
        assert self._context is not None, "result() before open()"
        assert all(self._answers), "result() before every request was delivered"
        check_answers(self._answers)
        return self._respond(
            self._answers,
            job_id=self._context.job_id,
            model=self._context.model.name,
            created=int(self._clock()),
        )


def complete_task(prompt: object, *, model: object = None, **sampling: Any) -> PromptTask:
    """Return the task of jobs.complete. Raises InvalidJob when an argument is wrong."""
    asked_for = parse_model(model)
    values = parse_sampling(sampling)
    prompts = parse_prompts(prompt)
    check_choices(len(prompts), values)
    requests = [Request(prompt=item, messages=None, sampling=values) for item in prompts]
    return PromptTask(requests, text_completion, asked_for)


def chat_task(messages: object, *, model: object = None, **sampling: Any) -> PromptTask:
    """Return the task of jobs.chat. Raises InvalidJob when an argument is wrong."""
    asked_for = parse_model(model)
    request = Request(prompt=None, messages=parse_messages(messages), sampling=parse_sampling(sampling))
    return PromptTask([request], chat_completion, asked_for)
