"""The task of `jobs.complete` and `jobs.chat`: prompts in the job, answers in its result."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

from jobs.context import JobContext
from jobs.context.checks import NO_REPAIRS, RepairOptions, split_repair_options
from jobs.context.served_model import parse_model
from jobs.context.under_way import KeptCompletion, LeftPrompt, UnderWay
from jobs.errors import InvalidJob, RequestFailed, ResultTooLarge
from jobs.prompts.arguments import Prompt, Unusable, check_choices, parse_prompts, parse_sampling
from jobs.prompts.attempts import Attempts, check_repairs, hashed_seed
from jobs.prompts.messages import OF_VALUES, normal_messages, refuse_chat_options, split_chat_options
from jobs.prompts.pictures import pictured_task, with_pictures
from jobs.prompts.response_options import chat_response_options, completion_options
from jobs.prompts.responses import Answers, chat_completion, text_completion
from jobs.prompts.template_texts import as_shown
from jobs.prompts.templated_task import asked_task
from jobs.tasks import Completion, OpenTask, Parts, Request, Task

#: A job shows its progress once it has run so long, and then not more often: most are over before.
PROGRESS_AFTER_S, PROGRESS_EVERY_S = 5.0, 2.0

#: How a result's id begins where that is not its kind; a list has no id.
ID_PREFIXES = {"text_completion": "cmpl", "chat.completion": "chatcmpl", "classification": "classify", "list": None}

#: Kinds of results that have OpenAI's system_fingerprint. It is the model's, and covers all that changes its answers.
_OF_COMPLETIONS = ("text_completion", "chat.completion")

#: Builds the job's result, but for its id, time and model, of the answers and the job's id; see responses.py.
Respond = Callable[[Answers, str], dict[str, Any]]


@dataclass(frozen=True)
class PromptTask(Task):
    """The prompts of one job, in order, and how they are answered.

    model: None takes whichever is served. values_are_text: control tokens in earlier answers are text.
    """

    prompts: Sequence[Request | Unusable]
    respond: Respond
    model: str | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    repairs: RepairOptions = NO_REPAIRS
    clock: Callable[[], float] = time.time
    values_are_text: bool = True

    def open(self, context: JobContext) -> OpenTask:
        """Raise ModelNotServed for another model, InvalidJob for sampling or a check that cannot be."""
        context.model.check_asked_for(self.model)
        context.check_sampling(self.sampling)
        context.checks.admit(self.repairs)
        return OpenPrompts(context, self)


@dataclass
class _Asked:
    """A prompt of a job. attempts: its way to an answer, where it may be tried again.

    num_continued: tokens of an earlier answer that the request under way continues. delivered: if a journal is kept,
    what its requests got, and why a check refused it. asked: see LeftPrompt.
    """

    place: int
    attempts: Attempts | None = None
    answers: Sequence[Completion] = ()
    num_continued: int = 0
    delivered: list[tuple[Sequence[Completion], str | None]] = field(default_factory=list)
    asked: str = ""

    def left(self, so_far: Mapping[int, Sequence[int]]) -> LeftPrompt:
        """Return what another worker needs to go on. so_far: the tokens of the request that is not delivered."""
        completions = [(number, each) for number, (each, _) in enumerate(self.delivered)]
        reasons = [reason for _, reason in self.delivered]
        return LeftPrompt(UnderWay(completions, {len(completions): so_far}), reasons, self.asked)


class OpenPrompts(OpenTask):
    """Holds its answers, and its requests until asked for, in memory: a job is no larger than what Redis took."""

    def __init__(self, context: JobContext, task: PromptTask) -> None:
        self._context, self._repairs = context, task.repairs
        self._control_tokens = context.model.control_tokens if task.values_are_text else ()
        self._sampling, self._respond, self._clock = task.sampling, task.respond, task.clock
        self._began_at: float | None = None
        self._shown_at, self._shown = 0.0, dict[str, int]()
        self._num_chars = self._num_tokens = 0
        self._found = {} if context.journal is None else context.journal.read()
        self._now = context.model.pinned(task.clock()).clock if context.journal is not None else ""
        self._prompts = list(map(_Asked, range(len(task.prompts))))
        asked = [(each, self._begin(each, prompt)) for each, prompt in zip(self._prompts, task.prompts, strict=True)]
        waiting = [(prompt, request) for prompt, request in asked if request is not None]
        self._waiting = deque(sorted(waiting, key=lambda each: each[0].place not in self._found))
        self._sent: list[_Asked] = []

    def _begin(self, asked: _Asked, prompt: Request | Unusable) -> Request | None:
        """Return what to ask first, or None where there is an answer already."""
        if isinstance(prompt, Unusable):
            asked.answers = self._failed(prompt.reason)
            return None
        if self._repairs.is_asked_for:
            given: dict[str, Any] = {"prompt": as_shown(prompt.prompt)}
            if prompt.messages is not None:
                given = {"messages": with_pictures(prompt.messages, lambda _: None)}
            asked.attempts = Attempts(prompt, given, self._repairs, self._context.checks, self._control_tokens)
        if self._context.journal is not None:
            asked.asked = prompt.digest(self._now)
        left = self._found.pop(asked.place, None)
        if left is None or left.asked != asked.asked:  # of another prompt: the template's answers are new
            return prompt
        self._found[asked.place] = left
        was, request = left.under_way, cast("Request | None", prompt)
        for (_, completions), reason in zip(was.delivered, left.reasons, strict=False):
            if request is not None:
                if asked.attempts is not None:
                    asked.attempts.check_error = reason
                request = self._take(asked, completions)
        return request and replace(request, resumed=was.so_far.get(len(was.delivered), {}))

    def keep(self, so_far: Mapping[int, Mapping[int, Sequence[int]]]) -> Callable[[], None] | None:
        if self._context.journal is None:
            return None
        tokens = dict[int, dict[int, Sequence[int]]]()
        for index, samples in so_far.items():
            sent = self._sent[index]
            tokens[sent.place] = {number: each[sent.num_continued :] for number, each in samples.items()}
        left = dict(self._found)  # of which some may wait for the engine still
        for prompt in self._prompts:
            now = prompt.left(tokens.get(prompt.place, {}))
            if prompt.place not in left or now.under_way.length > left[prompt.place].under_way.length:
                left[prompt.place] = now
        kept = [(place, each) for place, each in left.items() if each.under_way.can_be_kept]
        return partial(self._context.journal.write, kept) if kept else None

    def requests(self) -> Iterator[Request]:
        if self._began_at is None:
            self._began_at = self._clock()
        while self._waiting:
            prompt, request = self._waiting.popleft()
            prompt.num_continued = len(request.continued)
            self._sent.append(prompt)
            yield request

    @property
    def has_more(self) -> bool:
        return bool(self._waiting)

    @property
    def num_requests(self) -> int:
        return len(self._sent) + len(self._waiting)

    @property
    def inspects(self) -> bool:
        return self._repairs.check is not None

    def inspect(self, index: int, completions: Sequence[Completion]) -> None:
        attempts = self._sent[index].attempts
        assert attempts is not None, "inspected without a check"
        attempts.inspect(completions[0])

    def deliver(self, index: int, completions: Sequence[Completion]) -> None:
        prompt = self._sent[index]
        if (request := self._take(prompt, completions)) is not None:
            self._waiting.appendleft((prompt, request))

    def _take(self, prompt: _Asked, completions: Sequence[Completion]) -> Request | None:
        """Take what a request got; return the next one, or None once the prompt has its answers."""
        attempts = prompt.attempts
        if self._context.journal is not None:
            prompt.delivered.append((completions, None if attempts is None else attempts.check_error))
        if attempts is not None:
            if (following := attempts.deliver(completions[0])) is not None:
                return following
            completions = [attempts]
        for sample in completions:  # at least: base64 has 16 characters for three numbers of an embedding
            numbers = sample.embedding or sample.class_scores or ()
            self._num_chars += len(sample.text) + len(sample.reasoning or "") + 5 * len(numbers)
        if self._num_chars > self._context.max_result_bytes:
            raise ResultTooLarge(self._context.max_result_bytes)
        failed = next((sample for sample in completions if sample.finish_reason == "error"), None)
        samples: Sequence[Completion] = sorted(completions, key=lambda sample: sample.index)
        if failed is not None and attempts is None:
            samples = self._failed(failed.error)
        prompt.attempts, prompt.answers = None, samples
        self._num_tokens += sum(len(sample.token_ids) for sample in samples)
        return None

    def progress(self) -> dict[str, Any] | None:
        if self._began_at is None:
            return None
        now = self._clock()
        if now - self._began_at < PROGRESS_AFTER_S:
            return None
        if not self._shown or now - self._shown_at >= PROGRESS_EVERY_S:
            self._shown_at = now
            num_done = sum(1 for prompt in self._prompts if prompt.answers)
            self._shown = {"prompts": len(self._prompts), "prompts_done": num_done, "tokens": self._num_tokens}
        return self._shown

    def _failed(self, reason: str | None) -> Sequence[Completion]:
        n = self._sampling.get("n", 1)
        failed = KeptCompletion(0, (), "", "error", 0, 0, reason or "the engine gave no reason", None)
        return [failed] * (n if isinstance(n, int) else 1)

    def result(self) -> dict[str, Any]:
        """Return OpenAI's response shape. Raises RequestFailed when every prompt failed; else choices tell of that."""
        answers = [prompt.answers for prompt in self._prompts]
        assert all(answers), "result() before every request was delivered"
        if all(samples[0].finish_reason == "error" for samples in answers):
            raise RequestFailed(0, answers[0][0].error)
        job_id = self._context.job_id
        content = self._respond(answers, job_id)
        prefix = ID_PREFIXES.get(content["object"], content["object"])
        named = {} if prefix is None else {"id": f"{prefix}-{job_id}", "created": int(self._clock())}
        model = self._context.model
        told = {"system_fingerprint": model.fingerprint} if content["object"] in _OF_COMPLETIONS else {}
        return {**named, "model": model.name, **told, **content}


def text_requests(
    prompts: Sequence[Prompt | Unusable], values: Mapping[str, Any], kind: str = "generate"
) -> list[Request | Unusable]:
    return [each if isinstance(each, Unusable) else Request(each, None, values, kind=kind) for each in prompts]


def _seeded(requests: Sequence[Request | Unusable]) -> list[Request | Unusable]:
    """Give each request of a list its own seed, so that they do not all draw the same random numbers.

    The first request keeps the seed that was sent. Each other seed follows from it and the request's place.
    """
    seeded: list[Request | Unusable] = []
    for place, request in enumerate(requests):
        if place > 0 and isinstance(request, Request) and request.sampling.get("seed") is not None:
            seed = hashed_seed(f"{request.sampling['seed']}:{place}")
            request = replace(request, sampling={**request.sampling, "seed": seed})
        seeded.append(request)
    return seeded


def complete_task(
    prompt: object = None, *, prompt_template: object = None, model: object = None, **sampling: Any
) -> Task:
    asked_for = parse_model(model)
    others, repairs = split_repair_options(sampling)
    others = parse_sampling(others)
    refuse_chat_options(others)
    others, chat = split_chat_options(others)
    values_are_text = chat.get(OF_VALUES, True)
    values, options = completion_options(others)
    check_repairs(repairs, values, prompt_only=options.prompt_only)

    def task(_: str, prompt: object) -> PromptTask:
        prompts = parse_prompts(prompt)
        check_choices(len(prompts), values)
        if repairs.check is not None and any(isinstance(each, list) for each in prompts):
            raise InvalidJob("check and a prompt of token ids: its reason is a text: give the prompt as a text")
        respond = partial(text_completion, options=options)
        requests = _seeded(text_requests(prompts, values))
        return PromptTask(requests, respond, asked_for, values, repairs, values_are_text=values_are_text)

    return asked_task(task, values_are_text=values_are_text, prompt=prompt, prompt_template=prompt_template)


def chat_task(
    messages: object = None, *, messages_template: object = None, model: object = None, **options: Any
) -> Task:
    asked_for = parse_model(model)
    others, repairs = split_repair_options(options)
    others, chat = split_chat_options(parse_sampling(others))
    values, response = chat_response_options(others)
    check_repairs(repairs, values, has_tools="tools" in chat)

    def task(messages: Parts) -> PromptTask:
        respond = partial(chat_completion, options=response)
        return PromptTask([Request(None, messages, values, chat)], respond, asked_for, values, repairs)

    def parsed(_: str, messages: object) -> Task:
        return pictured_task(normal_messages(messages), task)

    return asked_task(parsed, values_are_text=True, messages=messages, messages_template=messages_template)
