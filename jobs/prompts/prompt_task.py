"""The task of a job of prompts. The job's arguments hold the prompts, and its result holds the answers."""

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from jobs.context import JobContext
from jobs.context.adapters import ADAPTER, digest_of, name_of
from jobs.context.answers import AnswerMemo
from jobs.context.checks import NO_REPAIRS, RepairOptions
from jobs.context.values import some_text
from jobs.errors import InvalidJob, ModelNotServed, RequestFailed, ResultTooLarge
from jobs.items.item import Ask, Item, Samples
from jobs.items.records import NOTHING, Progress
from jobs.items.runner import ItemRunner, ItemsTask, PromptTokens
from jobs.items.under_way import Entry
from jobs.prompts.arguments import MAX_MODEL_CHARS, Unusable
from jobs.prompts.generated import PromptAnswer, failed, generated
from jobs.prompts.pictures import without_pictures
from jobs.prompts.responses import Answers
from jobs.prompts.template_texts import without_breaks
from jobs.prompts.ways.way import Way
from jobs.tasks import OpenTask, Request, Task

#: The seconds after which a job begins to write its progress. So the many short jobs never write it.
PROGRESS_AFTER_S = 5.0
PROGRESS_EVERY_S = 2.0

#: The beginning of a result's id, by the result's kind. For a kind that is missing here, the id begins with the kind
#: itself. A list has no id.
ID_PREFIXES = {
    "text_completion": "cmpl",
    "chat.completion": "chatcmpl",
    "classification": "classify",
    "list": None,
}

#: Kinds of results that have OpenAI's system_fingerprint. This is the model's fingerprint, which changes whenever its
#: answers may change. With an adapter, the digest of the adapter's files follows.
_WITH_FINGERPRINT = ("text_completion", "chat.completion")

#: The kind of requests that a model's sequence-classification head answers.
HEAD_KIND = "classify"

#: Makes the job's result from the answers and the job's id. PromptTask adds the result's id, time and model.
Respond = Callable[[Answers, str], dict[str, Any]]


@dataclass(frozen=True)
class PromptTask(Task):
    """The prompts of one job, in order, and how they are answered.

    respond: makes the result. model: the model that the job asks for; None for any model.
    sampling: the sampling values of all requests. repairs: how answers are checked.
    tokens_are_text: whether control tokens in an earlier answer are read as plain text when the prompt is asked again.
    way: how each prompt gets its answer from several requests; None without such a way.
    """

    prompts: Sequence[Request | Unusable]
    respond: Respond
    model: str | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    repairs: RepairOptions = NO_REPAIRS
    clock: Callable[[], float] = time.time
    tokens_are_text: bool = True
    way: Way | None = None

    def task_to_open(self, context: JobContext) -> "PromptTask":
        """Return the task with its adapter's name replaced by the adapter's pinned text; see Adapters.pin.

        `model` may be the name of an adapter.
        Raises ModelNotServed, UnknownAdapter, and InvalidJob if the job asks the model's head, which takes no adapter.
        """
        adapter = self.sampling.get(ADAPTER)
        model = self.model
        if model is not None and model not in context.model.names:
            # An adapter may have this name.
            if model not in context.adapters.names:
                raise ModelNotServed(model, _served_text(context))
            if adapter not in (None, model):
                raise InvalidJob("model and adapter each name an adapter: give one of them")
            adapter = model
            model = None
        if adapter is None:
            return self
        name = some_text(ADAPTER, adapter, MAX_MODEL_CHARS)
        requests = [prompt for prompt in self.prompts if isinstance(prompt, Request)]
        asks_head = any(request.kind == HEAD_KIND for request in requests)
        if asks_head:
            raise InvalidJob(
                f"{name!r} is an adapter, and a model's head gives classes and scores only without an adapter: "
                f"name {context.model.name!r}, or leave `model` out"
            )
        pinned = context.adapters.pin(name)
        prompts: list[Request | Unusable] = []
        for prompt in self.prompts:
            if isinstance(prompt, Request):
                prompt = replace(prompt, sampling={**prompt.sampling, ADAPTER: pinned})
            prompts.append(prompt)
        sampling = {**self.sampling, ADAPTER: pinned}
        return replace(self, prompts=prompts, model=model, sampling=sampling)

    def open(self, context: JobContext) -> OpenTask:
        """Check the job, and return its open task. Raises the errors of `task_to_open` and `check`."""
        task = self.task_to_open(context)
        task.check(context)
        return OpenPrompts(context, task)

    def check(self, context: JobContext) -> None:
        """Raise ModelNotServed if the job asks for another model, or InvalidJob if this worker refuses its options."""
        if self.model is not None:
            context.model.check_asked_for(self.model)
        context.check_sampling(self.sampling)
        if self.repairs.check is not None:
            context.checks.admit(self.repairs)
        if self.way is not None:
            self.way.admit(context.checks)

    @property
    def has_checks(self) -> bool:
        """Whether a child process looks at answers."""
        way_has_checks = self.way is not None and self.way.has_checks
        return self.repairs.check is not None or way_has_checks

    def item(
        self, prompt: Request | Unusable, control_tokens: Collection[str] = ()
    ) -> Item[PromptAnswer]:
        """Return the Item of one prompt: a generator of the prompt's requests and checks.

        control_tokens: the texts of the model's control tokens.
        """
        if isinstance(prompt, Unusable):
            return _answered_item(failed(prompt.reason, self.num_samples))
        if self.way is not None:
            return self.way.item(prompt)
        row: dict[str, Any] = {}  # what a check function gets beside the answer
        if self.repairs.may_ask_again:
            if prompt.messages is not None:
                row = {"messages": without_pictures(prompt.messages)}
            else:
                row = {"prompt": without_breaks(prompt.prompt)}
        # A later attempt's prompt may repeat an answer. The answer's control tokens are then read as plain text, if the
        # job has not turned this off.
        tokens_read_as_text = control_tokens if self.tokens_are_text else ()
        return generated(prompt, self.repairs, row, tokens_read_as_text)

    @property
    def num_samples(self) -> int:
        """Return how many samples each prompt gets."""
        n = self.sampling.get("n", 1)
        return n if isinstance(n, int) else 1  # the engine refuses an n that is no number

    def result(self, answers: Answers, context: JobContext) -> dict[str, Any]:
        """Return OpenAI's response, with the error of each prompt that failed. Raises RequestFailed if all failed."""
        answers = [self._failed_as_a_whole(answer) for answer in answers]
        if all(answer.failed_sample is not None for answer in answers):
            raise RequestFailed(0, answers[0].first.error)
        content = self.respond(answers, context.job_id)

        head: dict[str, Any] = {}
        kind = content["object"]
        id_prefix = ID_PREFIXES.get(kind, kind)
        if id_prefix is not None:  # a list has no id
            head = {"id": f"{id_prefix}-{context.job_id}", "created": int(self.clock())}
        head["model"] = context.model.name
        fingerprint = context.model.fingerprint
        adapter = self.sampling.get(ADAPTER)
        if adapter is not None:
            head["model"] = name_of(adapter)
            fingerprint += f"/{digest_of(adapter)}"
        if kind in _WITH_FINGERPRINT:
            head["system_fingerprint"] = fingerprint
        return {**head, **content}

    def _failed_as_a_whole(self, answer: PromptAnswer) -> PromptAnswer:
        """Return an answer. If one of its samples has failed, return an answer whose samples have all failed.

        If the job checks or continues answers, an answer has only one sample, and is returned unchanged.
        """
        failed_sample = answer.failed_sample
        if failed_sample is None or self.repairs.may_ask_again:
            return answer
        return failed(failed_sample.error, self.num_samples)


def _answered_item(answer: PromptAnswer) -> Item[PromptAnswer]:
    """Return an Item that asks nothing and returns this answer."""
    yield from ()  # makes this function a generator
    return answer


#: A memory that remembers nothing, because a job asks each of its prompts, even if prompts are equal.
NO_MEMO = AnswerMemo(0)


class PromptAsk(Ask[PromptAnswer]):
    """What a job's runner needs to know about the job's prompts. has_checks: whether answers are checked."""

    def __init__(self, *, has_checks: bool) -> None:
        self.has_checks = has_checks


class OpenPrompts(ItemsTask):
    """Asks the prompts of one job. All prompts are held in memory."""

    runner: ItemRunner[PromptAnswer]

    def __init__(self, context: JobContext, task: PromptTask) -> None:
        self._context = context
        self._task = task
        self._began_at: float | None = None  # when `requests` was first called
        self._last_progress: dict[str, int] = {}  # what `progress` returned last
        self._progress_at = 0.0  # when `_last_progress` was counted
        # How many of the runner's answers are counted, and the characters and tokens of these answers.
        self._num_counted = 0
        self._num_chars = 0
        self._num_tokens = 0

        self._opened_at = task.clock()
        self._earlier_progress = self._with_sent_tokens(self._read_journal())

        entries: list[Entry[PromptAnswer]] = []
        answers: list[PromptAnswer | None] = []
        for index, prompt in enumerate(task.prompts):
            if isinstance(prompt, Unusable):
                answers.append(failed(prompt.reason, task.num_samples))
            else:
                answers.append(None)
                make = partial(task.item, prompt, context.model.control_tokens)
                entries.append(Entry([index], make))
        ask = PromptAsk(has_checks=task.has_checks)
        keeps_replies = context.journal is not None
        self.runner = ItemRunner(
            entries, answers, ask, context.checks, NO_MEMO, keeps_replies=keeps_replies
        )
        if self._earlier_progress:
            self.runner.resume(self._earlier_progress)
            self._count_answers()

    @cached_property
    def _digests(self) -> dict[int, str]:
        """Return each prompt's digest, by the prompt's index. The journal names prompts by their digests.

        The digests are computed when they are first needed, because most jobs end before they write a journal.
        """
        clock = self._context.model.pinned(self._opened_at).clock
        digests = {}
        for index, prompt in enumerate(self._task.prompts):
            if isinstance(prompt, Request):
                digests[index] = prompt.digest(clock)
        return digests

    def _read_journal(self) -> dict[int, Progress]:
        """Return each prompt's progress in an earlier execution, by the prompt's index.

        A prompt that has changed since then is left out.
        """
        journal = self._context.journal
        if journal is None or journal.stored is None:
            return {}
        progress_of: dict[int, Progress] = {}
        try:
            for index, digest, progress in journal.read():
                if digest == self._digests.get(index):
                    progress_of[index] = Progress.from_json(progress)
        except (ValueError, TypeError, KeyError):  # a damaged journal costs time and nothing else
            return {}
        return progress_of

    def _with_sent_tokens(self, progress_of: dict[int, Progress]) -> dict[int, Progress]:
        """Return an earlier execution's progress, with all tokens that a client of the job has received already.

        The answer must go on after these tokens.
        progress_of: how far the earlier execution came, by the prompts' indices.
        """
        journal = self._context.journal
        task = self._task
        if journal is None or not journal.sent:
            return progress_of
        # Only a job of one request can be followed.
        if len(task.prompts) != 1 or task.repairs.may_ask_again or task.way is not None:
            return progress_of
        progress = progress_of.get(0, NOTHING)
        has_completion = bool(progress.replies or progress.received)
        if has_completion:  # the completion is whole, so the sent tokens are a part of it
            return progress_of
        tokens = journal.with_sent(progress.tokens.get(0, {}))
        if not tokens:
            return progress_of
        return {0: replace(progress, tokens={0: tokens})}

    def keep(self, tokens: PromptTokens) -> Callable[[], None] | None:
        """Return a function that writes the journal anew, with the progress of all prompts. See OpenTask.

        Returns None if there is nothing to write.
        """
        if self._context.journal is None:
            return None
        # A prompt that still waits for the engine has no tokens yet. So an earlier execution's progress counts until
        # this execution has come further.
        progress_of = dict(self._earlier_progress)
        for answered in self.runner.answered:
            index = answered.place
            progress_of[index] = Progress(answered.replies, num_tokens=answered.num_tokens)
        for index, progress in self.runner.under_way(tokens).items():
            if index not in progress_of or progress.sort_key > progress_of[index].sort_key:
                progress_of[index] = progress

        records = []
        for index, progress in progress_of.items():
            if progress.can_be_written:
                records.append((index, self._digests[index], progress.to_json()))
        if not records:
            return None
        return partial(self._context.journal.write, records)

    def requests(self) -> Iterator[Request]:
        """Yield the requests. `progress` counts the job's time from the first call."""
        if self._began_at is None:
            self._began_at = self._task.clock()
        return super().requests()

    def deliver(self, index: int, completions: Samples) -> None:
        """Take completions. Raises ResultTooLarge once the answers together are too large."""
        super().deliver(index, completions)
        self._count_answers()

    def _count_answers(self) -> None:
        """Count the new answers. Raises ResultTooLarge once all answers together have too many characters."""
        for answered in self.runner.answered[self._num_counted :]:
            self._num_counted += 1
            self._num_chars += answered.answer.num_chars
            self._num_tokens += sum(len(sample.token_ids) for sample in answered.answer.samples)
        if self._num_chars > self._context.max_result_bytes:
            raise ResultTooLarge(self._context.max_result_bytes)

    def progress(self) -> dict[str, Any] | None:
        """Return how many prompts are done. They are counted anew when the last count is PROGRESS_EVERY_S old.

        Returns None until the job has run for PROGRESS_AFTER_S.
        """
        if self._began_at is None:
            return None
        now = self._task.clock()
        if now - self._began_at < PROGRESS_AFTER_S:
            return None
        if not self._last_progress or now - self._progress_at >= PROGRESS_EVERY_S:
            self._progress_at = now
            self._last_progress = {
                "prompts": self.runner.num_places,
                "prompts_done": self.runner.counts.done,
                "tokens": self._num_tokens,
            }
        return self._last_progress

    def result(self) -> dict[str, Any]:
        """Return the job's response. Raises RequestFailed when every prompt failed."""
        return self._task.result(self.runner.answers(), self._context)


def _served_text(context: JobContext) -> str:
    """Return the names of the model and adapters that a job may ask for, as an error lists them."""
    model = repr(context.model.name)
    adapters = context.adapters.names_text
    return f"{model}, and adapters {adapters}" if adapters else model
