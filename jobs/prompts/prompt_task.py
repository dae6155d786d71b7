"""The task of `jobs.complete` and `jobs.chat`: prompts in the job, answers in its result."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Protocol

from jobs.context import JobContext
from jobs.context.check_options import NO_REPAIRS, RepairOptions, split_repair_options
from jobs.context.job_journal import LeftPrompt
from jobs.context.served_model import parse_model
from jobs.context.under_way import UnderWay
from jobs.errors import ResultTooLarge
from jobs.prompts.arguments import Prompt, Unusable, check_choices, parse_prompts, parse_sampling
from jobs.prompts.attempts import Attempts, check_prompts, check_repairs
from jobs.prompts.messages import parse_messages, refuse_chat_options, split_chat_options
from jobs.prompts.response_options import chat_response_options, completion_options
from jobs.prompts.responses import Answers, chat_completion, check_answers, failed_completion, text_completion
from jobs.prompts.templated_task import asked_task
from jobs.tasks import Completion, OpenTask, Request, Task

#: A job shows its progress once it has run so long, and then not more often: most are over before.
PROGRESS_AFTER_S, PROGRESS_EVERY_S = 5.0, 2.0


#: What the id of a result begins with, by its kind; a list of embeddings has none.
ID_PREFIXES = {
    "text_completion": "cmpl",
    "chat.completion": "chatcmpl",
    "classification": "classify",
    "loglikelihood": "loglikelihood",
    "rerank": "rerank",
}


class Respond(Protocol):
    """Builds the job's result but for its id, time and model, see responses.py."""

    def __call__(self, answers: Answers, job_id: str) -> dict[str, Any]: ...


@dataclass(frozen=True)
class PromptTask(Task):
    """The prompts of one job, in order, and how they are to be answered.

    model: what the job asks for; None takes whichever is served. sampling: that of every request. repairs: what is
    asked of the answers.
    """

    blocking: ClassVar[bool] = False

    prompts: Sequence[Request | Unusable]
    respond: Respond
    model: str | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    repairs: RepairOptions = NO_REPAIRS
    clock: Callable[[], float] = time.time

    def open(self, context: JobContext) -> OpenPrompts:
        """Raise ModelNotServed for another model, InvalidJob for sampling or a check that cannot be."""
        context.model.check_asked_for(self.model)
        context.check_sampling(self.sampling)
        context.checks.admit(self.repairs)
        return OpenPrompts(context, self)


class OpenPrompts(OpenTask):
    """Holds its answers, and its requests until asked for, in memory: a job is no larger than what Redis took."""

    def __init__(self, context: JobContext, task: PromptTask) -> None:
        self._job_id, self._model_name = context.job_id, context.model.name
        self._max_bytes, self._num_chars = context.max_result_bytes, 0
        self._sampling, self._respond, self._clock = task.sampling, task.respond, task.clock
        self._repairs, self._checks = task.repairs, context.checks
        self._began_at: float | None = None
        self._shown_at, self._shown = 0.0, dict[str, int]()
        self._num_tokens = 0
        self._unsent = deque(
            (place, prompt) for place, prompt in enumerate(task.prompts) if isinstance(prompt, Request)
        )
        #: What answers lead to, and of each request that was sent: its prompt's place, and the prompt's way.
        self._following: deque[tuple[int, Attempts | None, Request]] = deque()
        self._sent: list[tuple[int, Attempts | None]] = []
        self._answers: list[Sequence[Completion]] = [
            self._failed(prompt.reason) if isinstance(prompt, Unusable) else () for prompt in task.prompts
        ]
        self._num_done = sum(map(bool, self._answers))
        self._journal = context.journal
        #: What each prompt got, and why a check did not take it.
        self._delivered: defaultdict[int, list[tuple[Sequence[Completion], str | None]]] = defaultdict(list)
        self._found = {} if context.journal is None else context.journal.read()
        self._resume(self._found)

    def _resume(self, left: Mapping[int, LeftPrompt]) -> None:
        """Take prompts up where another execution has left them."""
        resumed = [each for each in self._unsent if each[0] in left]
        self._unsent = deque(each for each in self._unsent if each[0] not in left)
        for place, request in resumed:
            attempts, (was, reasons) = self._attempts(request), left[place]
            self._following.append((place, attempts, request))
            for (_, completions), reason in zip(was.delivered, reasons, strict=False):
                if not self._answers[place]:
                    self._following.pop()
                    if attempts is not None:
                        attempts.reason = reason
                    self._take(place, attempts, completions)
            if not self._answers[place]:
                _, _, following = self._following.pop()
                tokens = was.so_far.get(len(was.delivered), {})
                self._following.append((place, attempts, replace(following, resumed=tokens)))

    def keep(self, so_far: Mapping[int, Mapping[int, Sequence[int]]]) -> Callable[[], None] | None:
        tokens = {self._sent[index][0]: samples for index, samples in so_far.items()}
        left = {place: self._left(place, tokens.get(place, {})) for place in (*self._delivered, *tokens)}
        for place, found in self._found.items():  # of which some may wait for the engine still
            if place not in left or left[place].under_way.length < found.under_way.length:
                left[place] = found
        kept = [(place, each) for place, each in left.items() if each.under_way.can_be_kept]
        return partial(self._journal.write, kept) if kept and self._journal is not None else None

    def _left(self, place: int, so_far: Mapping[int, Sequence[int]]) -> LeftPrompt:
        delivered = self._delivered.get(place, [])
        completions = [(number, each) for number, (each, _) in enumerate(delivered)]
        return LeftPrompt(UnderWay(completions, {len(delivered): so_far}), [reason for _, reason in delivered])

    def requests(self) -> Iterator[Request]:
        if self._began_at is None:
            self._began_at = self._clock()
        while self._following or self._unsent:
            attempts: Attempts | None = None
            if self._following:
                place, attempts, request = self._following.popleft()
            else:
                place, request = self._unsent.popleft()
                attempts = self._attempts(request)
            self._sent.append((place, attempts))
            yield request

    def _attempts(self, request: Request) -> Attempts | None:
        if not self._repairs.is_asked_for:
            return None
        kind = "prompt" if request.messages is None else "messages"
        return Attempts(request, {kind: getattr(request, kind)}, self._repairs, self._checks)

    @property
    def has_more(self) -> bool:
        return bool(self._following)

    @property
    def num_requests(self) -> int:
        return len(self._sent) + len(self._following) + len(self._unsent)

    @property
    def inspects(self) -> bool:
        return self._repairs.check is not None

    def inspect(self, index: int, completions: Sequence[Completion]) -> None:
        _, attempts = self._sent[index]
        assert attempts is not None, "inspected without a check"
        attempts.inspect(completions[0])

    def deliver(self, index: int, completions: Sequence[Completion]) -> None:
        """Raises ResultTooLarge once the answers cannot be written any more."""
        place, attempts = self._sent[index]
        self._sent[index] = place, None
        self._take(place, attempts, completions)

    def _take(self, place: int, attempts: Attempts | None, completions: Sequence[Completion]) -> None:
        if self._journal is not None:
            self._delivered[place].append((completions, None if attempts is None else attempts.reason))
        if attempts is not None:
            following = attempts.deliver(completions[0])
            if following is not None:
                self._following.append((place, attempts, following))
                return
            completions = [attempts.outcome]
        for sample in completions:  # at least: base64 has 16 characters for three numbers of an embedding
            self._num_chars += len(sample.text) + len(sample.reasoning or "") + 5 * len(sample.embedding or ())
        if self._num_chars > self._max_bytes:
            raise ResultTooLarge(self._max_bytes)
        failed = next((sample for sample in completions if sample.finish_reason == "error"), None)
        samples: Sequence[Completion] = sorted(completions, key=lambda sample: sample.index)
        if failed is not None and attempts is None:
            samples = self._failed(failed.error)
        self._answers[place] = samples
        self._num_done += 1
        self._num_tokens += sum(len(sample.token_ids) for sample in samples)

    def progress(self) -> dict[str, Any] | None:
        """Return prompts, those that are answered, and tokens of their answers. None of a job that is short."""
        if self._began_at is None:
            return None
        now = self._clock()
        if now - self._began_at < PROGRESS_AFTER_S:
            return None
        if not self._shown or now - self._shown_at >= PROGRESS_EVERY_S:
            self._shown_at = now
            self._shown = {"prompts": len(self._answers), "prompts_done": self._num_done, "tokens": self._num_tokens}
        return self._shown

    def _failed(self, reason: str | None) -> Sequence[Completion]:
        """Return what stands for each sample of a prompt that failed: every choice keeps its number."""
        n = self._sampling.get("n", 1)
        failed = failed_completion(reason or "the engine gave no reason")
        return [failed] * (n if isinstance(n, int) else 1)

    def result(self) -> dict[str, Any]:
        """Return OpenAI's response shape. Raises RequestFailed when every prompt failed."""
        assert all(self._answers), "result() before every request was delivered"
        check_answers(self._answers)
        content = self._respond(self._answers, self._job_id)
        prefix = ID_PREFIXES.get(content["object"])
        named = {} if prefix is None else {"id": f"{prefix}-{self._job_id}", "created": int(self._clock())}
        return {**named, "model": self._model_name, **content}


def text_requests(
    prompts: Sequence[Prompt | Unusable], values: Mapping[str, Any], kind: str = "generate"
) -> list[Request | Unusable]:
    """Return what asks for each of some texts with the same values."""
    return [each if isinstance(each, Unusable) else Request(each, None, values, kind=kind) for each in prompts]


def complete_task(
    prompt: object = None, *, prompt_template: object = None, model: object = None, **sampling: Any
) -> Task:
    """Return the task of jobs.complete. Raises InvalidJob when an argument is wrong."""
    asked_for = parse_model(model)
    others, repairs = split_repair_options(sampling)
    values, options = completion_options(parse_sampling(others))
    refuse_chat_options(values)
    check_repairs(repairs, values, prompt_only=options.prompt_only)

    def task(_: str, prompt: object) -> PromptTask:
        prompts = parse_prompts(prompt)
        check_choices(len(prompts), values)
        check_prompts(repairs, prompts)
        respond = partial(text_completion, options=options)
        return PromptTask(text_requests(prompts, values), respond, asked_for, values, repairs)

    return asked_task(task, prompt=prompt, prompt_template=prompt_template)


def chat_task(
    messages: object = None, *, messages_template: object = None, model: object = None, **options: Any
) -> Task:
    """Return the task of jobs.chat. Raises InvalidJob when an argument is wrong."""
    asked_for = parse_model(model)
    others, repairs = split_repair_options(options)
    others, chat = split_chat_options(parse_sampling(others))
    values, response = chat_response_options(others)
    check_repairs(repairs, values, has_tools=chat.has_tools)

    def task(_: str, messages: object) -> PromptTask:
        request = Request(None, parse_messages(messages), values, chat.template)
        respond = partial(chat_completion, options=response, has_tools=chat.has_tools)
        return PromptTask([request], respond, asked_for, values, repairs)

    return asked_task(task, messages=messages, messages_template=messages_template)
