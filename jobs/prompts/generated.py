"""Generates the answer to a prompt. Asks again if a check refuses the answer, and continues an answer that was cut."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

from jobs.common.display import brief
from jobs.context.checks import DEFAULT_MAX_ATTEMPTS, RepairOptions
from jobs.errors import InvalidJob, InvalidValue
from jobs.items.item import Check, Item, Samples, asked_once
from jobs.items.records import PlainCompletion
from jobs.prompts.template_texts import with_breaks
from jobs.tasks import Completion, Logprob, Request

#: The reason for a completion that failed without a reason.
NO_REASON = "the engine gave no reason"

#: The engine's limit of tokens for a request without max_tokens.
DEFAULT_MAX_TOKENS = 256
#: Sampling values that only a prompt's first request has.
_FIRST_ONLY = ("echo", "prompt_logprobs")


@dataclass(frozen=True, slots=True)
class PromptAnswer:
    """The completions of one prompt.

    samples: the samples by index. If the prompt failed, each has an error. After several attempts there is one sample,
    with the prompt tokens of all attempts.
    num_generated: the number of tokens generated for each sample, in all attempts.
    attempts: how often the prompt was asked; 0 if the job's options allow only one attempt.
    check_error: why the answer is not valid; None if the answer is valid or is not checked.
    extras: further values of the answer, by the names of their columns. The Way that answered the prompt adds them.
    """

    samples: Samples
    num_generated: Sequence[int]
    attempts: int = 0
    check_error: str | None = None
    extras: Mapping[str, Any] = field(default_factory=dict)

    @property
    def first(self) -> Completion:
        """Return the first sample."""
        return self.samples[0]

    @property
    def failed_sample(self) -> Completion | None:
        """Return the first sample that failed; None if none failed. If one has failed, the prompt has no answer."""
        for sample in self.samples:
            if sample.finish_reason == "error":
                return sample
        return None

    @property
    def num_chars(self) -> int:
        """Return a lower bound of the number of characters that the answer takes in a response."""
        total = 0
        for sample in self.samples:
            numbers = sample.embedding or sample.class_scores or ()
            # Base64 takes 16 characters for three numbers of an embedding, so more than 5 for each number.
            num_chars_of_numbers = 5 * len(numbers)
            total += len(sample.text) + len(sample.reasoning or "") + num_chars_of_numbers
        return total


def failed(reason: str | None, n: int) -> PromptAnswer:
    """Return the answer of a prompt that failed. reason: the error of each sample. n: the number of samples."""
    sample = PlainCompletion(finish_reason="error", error=reason or NO_REASON)
    return PromptAnswer([sample] * n, [0] * n)


def merged(
    answer: Completion,
    prefills: Sequence[Completion],
    samples: Sequence[Completion],
    extras: Mapping[str, Any],
    error: str | None = None,
) -> PromptAnswer:
    """Return the one answer to which several requests have led. It has the counts of all requests.

    answer: the completion that is the answer. prefills: one completion of each request, to count the prompt tokens.
    samples: all completions, to count the generated tokens. extras: see PromptAnswer.
    error: why the answer is not valid; None if it is valid.
    """
    num_prompt_tokens = 0
    num_cached_tokens = 0
    for completion in prefills:
        num_prompt_tokens += completion.num_prompt_tokens
        num_cached_tokens += completion.num_cached_tokens
    num_generated = sum(len(completion.token_ids) for completion in samples)
    sample = PlainCompletion.of(
        answer,
        index=0,
        num_prompt_tokens=num_prompt_tokens,
        num_cached_tokens=num_cached_tokens,
        error=error or answer.error,
    )
    return PromptAnswer([sample], [num_generated], extras=extras)


def generated(
    request: Request, repairs: RepairOptions, row: Any = None, control_tokens: Collection[str] = ()
) -> Item[PromptAnswer]:
    """Return the Item that asks a prompt for its completions. An Item is a generator of requests and checks.

    row: what a check function gets beside the answer.
    control_tokens: the model's control tokens. They are read as plain text in an answer or a reason that is added to a
    text prompt; see with_breaks. In chats, the engine makes them plain text.
    """
    if repairs.may_ask_again:
        return _asked_until_accepted(request, repairs, row, control_tokens)
    return _answer_of_samples(asked_once(request))


def _answer_of_samples(item: Item[Samples]) -> Item[PromptAnswer]:
    """Return an Item whose answer has the samples that another Item returns."""
    samples = yield from item
    return PromptAnswer(samples, [len(sample.token_ids) for sample in samples])


def _asked_until_accepted(
    request: Request, repairs: RepairOptions, row: Any, control_tokens: Collection[str]
) -> Item[PromptAnswer]:
    """Return the Item that asks until an answer is accepted, or no attempts are left; see RepairOptions."""
    tally = _Tally()
    # The first request, without the sampling values that only a first request may have.
    original = replace(request, sampling=_later_sampling(request))
    # `prompt` is the first request, or a repaired one. `sent` is what the engine gets: `prompt` itself, or `prompt`
    # with a cut answer that the engine continues.
    prompt = request
    sent = request
    problem: str | None = None
    for attempt in range(1, repairs.max_attempts + 1):
        [[completion]] = yield [sent]  # one request with one sample
        if problem is not None and not sent.continued and _is_refused(completion):
            # The prompt repeats earlier answers, and is longer than the model allows. So these answers are left out.
            # The refused request does not count as an attempt.
            prompt = _without_answers(original, repairs, problem, attempt, control_tokens)
            sent = prompt
            [[completion]] = yield [sent]

        tally.add(completion, sent.continued)
        if completion.finish_reason == "error":
            if sent.continued and tally.answer is not None and repairs.check is not None:
                # The continuation failed, so the cut answer stays the answer. It was not checked before.
                problem = yield Check(repairs, tally.answer.text, row)
            break

        has_attempts_left = attempt < repairs.max_attempts
        was_cut = completion.finish_reason == "length"
        if repairs.continue_on_length and was_cut and has_attempts_left:
            sampling = _later_sampling(prompt)
            sent = replace(prompt, continued=completion.token_ids, sampling=sampling)
            continue

        if repairs.check is None:
            break
        problem = yield Check(repairs, completion.text, row)
        if problem is None or not has_attempts_left:
            break
        if _had_no_room(completion, prompt):
            prompt = _without_answers(original, repairs, problem, attempt + 1, control_tokens)
        else:
            prompt = replace(prompt, sampling=_sampling_of_attempt(original, attempt + 1))
            prompt = _repaired(prompt, repairs, problem, control_tokens, answer=completion.text)
        sent = prompt
    return PromptAnswer([tally.as_sample()], [tally.num_generated], attempt, problem)


class _Tally:
    """Sums up the attempts of one prompt. answer: the last completion without an error."""

    def __init__(self) -> None:
        self.answer: Completion | None = None
        self.num_generated = 0
        # The first completion. Only this one has the prompt's values; see _FIRST_ONLY.
        self._first: Completion | None = None
        self._logprobs: list[Mapping[int, Logprob]] = []
        self._num_prompt_tokens = 0
        self._num_cached_tokens = 0
        self._num_attempts = 0
        self._error: str | None = None

    def add(self, completion: Completion, continued: Sequence[int]) -> None:
        """Take the completion of an attempt. continued: the tokens of an earlier answer that this attempt continues."""
        self._num_attempts += 1
        if self._first is None:
            self._first = completion
        # The continued tokens were computed as a part of this attempt's prompt.
        self._num_prompt_tokens += completion.num_prompt_tokens + len(continued)
        self._num_cached_tokens += completion.num_cached_tokens
        if completion.finish_reason == "error":
            # The previous answer stays. If this attempt did not continue that answer, a check has refused that
            # answer before. The answer is then returned with an error that says that this attempt failed.
            if self.answer is not None and not continued:
                reason = completion.error or NO_REASON
                self._error = f"attempt {self._num_attempts} failed: {reason}"
            return

        # A completion's tokens begin with the continued tokens, which are counted already.
        self.num_generated += len(completion.token_ids) - len(continued)
        if not continued:
            self._logprobs = []
        self._logprobs += completion.logprobs or ()
        self.answer = completion

    def as_sample(self) -> Completion:
        """Return the answer, with the counts of all attempts. The values about the prompt are the first attempt's."""
        assert self._first is not None
        answer = self._first if self.answer is None else self.answer
        logprobs = None if answer.logprobs is None else self._logprobs
        return PlainCompletion.of(
            answer,
            num_prompt_tokens=self._num_prompt_tokens,
            num_cached_tokens=self._num_cached_tokens,
            logprobs=logprobs,
            prompt_logprobs=self._first.prompt_logprobs,
            prompt_text=self._first.prompt_text,
            prompt_tokens=self._first.prompt_tokens,
            error=self._error or answer.error,
        )


def _is_refused(completion: Completion) -> bool:
    """Whether the engine refused a request before it ran, for example because the prompt is too long."""
    has_run = completion.num_prompt_tokens > 0
    return completion.finish_reason == "error" and not has_run


def _had_no_room(completion: Completion, request: Request) -> bool:
    """Whether an answer was cut by the model's length, and not by max_tokens."""
    limit = request.sampling.get("max_tokens", DEFAULT_MAX_TOKENS)
    is_cut = completion.finish_reason == "length"
    return is_cut and type(limit) is int and len(completion.token_ids) < limit


def _sampling_of_attempt(original: Request, attempt: int) -> dict[str, Any]:
    """Return the sampling values of a later attempt. Its seed is computed from the seed of the first attempt.

    original: the first attempt's request, without the sampling values that only a first request may have.
    """
    return reseeded(original.sampling, f"attempt {attempt}")


def _repaired(
    request: Request,
    repairs: RepairOptions,
    reason: str,
    control_tokens: Collection[str],
    answer: str = "",
) -> Request:
    """Return a request that repeats an answer that is not valid, and asks for another answer.

    reason: why the answer is not valid. answer: the answer; with "" it is left out of a text prompt.
    """
    if request.messages is not None:
        return _repaired_chat(request, answer, repairs.repair_text(reason, is_chat=True))
    answer, reason = with_breaks([answer, reason], control_tokens)
    return _repaired_prompt(request, f"{answer}{repairs.repair_text(reason, is_chat=False)}")


def _without_answers(
    original: Request,
    repairs: RepairOptions,
    reason: str,
    attempt: int,
    control_tokens: Collection[str],
) -> Request:
    """Return a later attempt's request. It leaves out the earlier answers, for which there is no room.

    Only the reason follows the original prompt.
    original: see `_sampling_of_attempt`. reason: why the last answer is not valid.
    """
    request = replace(original, sampling=_sampling_of_attempt(original, attempt))
    if request.messages is None:
        return _repaired(request, repairs, reason, control_tokens)
    # Chat templates want users and assistants to take turns. So the reason is added to the user's last message.
    text = repairs.repair_text(reason, is_chat=True)
    *earlier_messages, last_message = request.messages
    if last_message["role"] != "user":
        return replace(request, messages=[*request.messages, {"role": "user", "content": text}])
    content = last_message["content"]
    if isinstance(content, str):
        extended = {**last_message, "content": f"{content}\n\n{text}"}
    else:
        extended = {**last_message, "content": [*content, {"type": "text", "text": text}]}
    return replace(request, messages=[*earlier_messages, extended])


def _repaired_chat(request: Request, answer: str, repair_text: str) -> Request:
    """Return a chat followed by its answer and by the message that asks for another answer."""
    assert request.messages is not None
    turns = [{"role": "assistant", "content": answer}, {"role": "user", "content": repair_text}]
    return replace(request, messages=[*request.messages, *turns])


def _repaired_prompt(request: Request, appended_text: str) -> Request:
    """Return a prompt followed by a text. appended_text: the prompt's answer, and words that ask for another answer."""
    assert request.prompt is not None
    if isinstance(request.prompt, str):
        return replace(request, prompt=f"{request.prompt}{appended_text}")
    return replace(request, prompt=[*request.prompt, {"type": "text", "text": appended_text}])


def _later_sampling(request: Request) -> dict[str, Any]:
    """Return a request's sampling values, without those that only a prompt's first request may have."""
    return {name: value for name, value in request.sampling.items() if name not in _FIRST_ONLY}


def check_repairs(
    options: RepairOptions,
    sampling: Mapping[str, Any],
    *,
    has_tools: bool = False,
    prompt_only: bool = False,
    has_steps: bool = False,
    has_labels: bool = False,
) -> None:
    """Raise InvalidJob if checks and continued answers cannot be combined with another option.

    has_tools: whether the chat offers tools. prompt_only: whether nothing is generated after the prompt. has_steps:
    whether rows of a run have several prompts. has_labels: whether the run asks for labels.
    """
    if options.repair_template is not None and options.check is None:
        raise InvalidJob(
            "repair_template asks for a valid answer, and there is no check: give one too"
        )
    if not options.may_ask_again:
        if options.max_attempts != DEFAULT_MAX_ATTEMPTS:
            raise InvalidJob(
                "max_attempts is for answers that are tried again: give a check, or continue_on_length"
            )
        return
    name = "continue_on_length" if options.check is None else "check"
    n = sampling.get("n", 1)
    if type(n) is int and n > 1:
        raise InvalidValue(
            f"{name} and n={{}}: a prompt that is tried again has one answer", brief(n)
        )
    if prompt_only:
        raise InvalidJob(f"{name} and max_tokens=0: there is no answer that could be tried again")
    if has_tools and options.check is not None:
        raise InvalidJob(
            "check and tools: a check reads the text of an answer, and a tool call has no text"
        )
    if has_labels:
        raise InvalidJob(f"{name} and labels: a label is no answer that could be tried again")
    if has_steps:
        raise InvalidJob(
            f"{name} and prompts: rows of several prompts are asked once: leave one out"
        )


def reseeded(sampling: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return sampling values with a new seed, which is computed from the old seed and `name`.

    Values without a seed are returned as they are.
    """
    if sampling.get("seed") is None:
        return dict(sampling)
    return {**sampling, "seed": hashed_seed(f"{sampling['seed']}:{name}")}


def hashed_seed(text: str) -> int:
    """Return a seed that is computed from a text: a number from 0 to 2**63 - 1."""
    digest = blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1  # 63 of the 64 bits
