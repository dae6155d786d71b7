"""The way of a prompt to an answer that stands: it is checked, asked for again, or goes on where it was cut.

What follows depends on the prompt, its seed and its answers alone: another worker that begins anew takes the same way.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

from jobs.common.display import brief
from jobs.context.check_options import DEFAULT_MAX_ATTEMPTS, RepairOptions
from jobs.context.check_processes import Checks
from jobs.errors import InvalidJob, InvalidValue
from jobs.tasks import Completion, Logprob, Request

#: Of the first prompt alone.
_OF_PROMPT = ("echo", "prompt_logprobs")


@dataclass(frozen=True)
class Attempted:
    """The answer that a prompt has in the end.

    attempts: how often it was asked. check_error: why the answer is not valid, None where it is, or where
    nothing checks it. error: why the first attempt failed, or a further one. num_prompt_tokens,
    num_cached_tokens, num_generated_tokens: of all attempts together; what an answer that goes on has already
    is of its prompt then. The rest is that of `answer`, the prompt's own of `first`.
    """

    attempts: int
    check_error: str | None
    num_generated_tokens: int
    num_prompt_tokens: int
    num_cached_tokens: int
    error: str | None
    logprobs: Sequence[Mapping[int, Logprob]] | None
    answer: Completion
    first: Completion

    def __getattr__(self, name: str) -> Any:
        return getattr(self.first if name.startswith("prompt_") else self.answer, name)


class Attempts:
    """One prompt: for each request `inspect` in any thread, then `deliver`.

    row: what a function that checks gets. reason: why the last answer is not valid, also where it was inspected before.
    """

    def __init__(self, request: Request, row: Any, options: RepairOptions, checks: Checks) -> None:
        self._request, self._row, self._options, self._checks = request, row, options, checks
        self.reason: str | None = None
        self._seed = request.sampling.get("seed")
        self._number = 1
        self._first: Completion | None = None
        self._answer: Completion | None = None
        self._continued: Sequence[int] = ()
        self._logprobs: list[Mapping[int, Logprob]] = []
        self._error: str | None = None
        self._prompt = self._cached = self._generated = 0

    def inspect(self, completion: Completion) -> None:
        """Check an answer that may stand. Raises InvalidJob for a check that can check nothing."""
        answer: Completion | None = completion
        if completion.finish_reason == "error":  # the one before stands, and was not checked where it was cut
            answer = self._answer if self._continued else None
        if answer is not None and self._options.check is not None and not self._goes_on(completion):
            self.reason = self._checks.reason(self._options, self._row, answer.text)

    def deliver(self, completion: Completion) -> Request | None:
        """Take an answer; return what to ask next, or None once `outcome` stands."""
        self._first = self._first or completion
        self._prompt += completion.num_prompt_tokens + len(self._continued)
        self._cached += completion.num_cached_tokens
        if completion.finish_reason == "error":  # the answer before stands, beside an error if it is not valid
            if self._answer is not None and not self._continued:
                self._error = f"attempt {self._number} failed: {completion.error or 'the engine gave no reason'}"
            return None
        self._generated += len(completion.token_ids) - len(self._continued)
        if not self._continued:
            self._logprobs = []
        self._logprobs += completion.logprobs or ()
        self._answer = completion
        goes_on = self._goes_on(completion)
        if not goes_on and (self.reason is None or self._number == self._options.max_attempts):
            return None
        self._number += 1
        if goes_on:
            self._continued = completion.token_ids
            return replace(self._request, continued=self._continued, sampling=self._sampling({}))
        self._continued = ()
        self._request = self._repair(completion.text)
        return self._request

    @property
    def outcome(self) -> Attempted:
        """Return the answer that stands."""
        assert self._first is not None, "outcome before an answer was delivered"
        answer = self._answer or self._first
        return Attempted(
            attempts=self._number,
            check_error=self.reason,
            num_generated_tokens=self._generated,
            num_prompt_tokens=self._prompt,
            num_cached_tokens=self._cached,
            error=self._error or answer.error,
            logprobs=None if answer.logprobs is None else self._logprobs,
            answer=answer,
            first=self._first,
        )

    def _goes_on(self, completion: Completion) -> bool:
        return (
            self._options.continue_on_length
            and completion.finish_reason == "length"
            and self._number < self._options.max_attempts
        )

    def _repair(self, text: str) -> Request:
        """Return what asks for another answer than `text`, behind all that was asked and answered."""
        assert self.reason is not None
        request, is_chat = self._request, self._request.messages is not None
        behind = self._options.text_behind(self.reason, is_chat)
        seed = {} if self._seed is None else {"seed": attempt_seed(self._seed, self._number)}
        asked = replace(request, sampling=self._sampling(seed))
        if request.messages is not None:
            answer = {"role": "assistant", "content": text}
            return replace(asked, messages=[*request.messages, answer, {"role": "user", "content": behind}])
        assert request.prompt is not None
        if isinstance(request.prompt, str):
            return replace(asked, prompt=f"{request.prompt}{text}{behind}")
        return replace(asked, prompt=[*request.prompt, {"type": "text", "text": f"{text}{behind}"}])

    def _sampling(self, seed: Mapping[str, Any]) -> dict[str, Any]:
        values = {name: value for name, value in self._request.sampling.items() if name not in _OF_PROMPT}
        return {**values, **seed}


def check_repairs(
    options: RepairOptions,
    sampling: Mapping[str, Any],
    *,
    has_tools: bool = False,
    prompt_only: bool = False,
    has_steps: bool = False,
    has_labels: bool = False,
) -> None:
    """Raise InvalidJob for what answers cannot be tried again with. has_steps: rows of a run have several prompts."""
    if not options.is_asked_for:
        if options.max_attempts != DEFAULT_MAX_ATTEMPTS:
            raise InvalidJob(
                "max_attempts says how often an answer may be tried again, and nothing does that: "
                "give a check, or continue_on_length"
            )
        if options.repair_template is None:
            return
    if options.repair_template is not None and options.check is None:
        raise InvalidJob("repair_template asks for a valid answer, and there is no check: give one too")
    name = "continue_on_length" if options.check is None else "check"
    n = sampling.get("n", 1)
    if type(n) is int and n > 1:
        raise InvalidValue(f"{name} and n={{}}: a prompt that is tried again has one answer", brief(n))
    for is_so, problem in (
        (prompt_only, f"{name} and max_tokens=0: there is no answer that could be tried again"),
        (has_tools and options.check, "check and tools: a check is of an answer's text, and a call of a tool has none"),
        (has_labels, f"{name} and labels: a label is no answer that could be tried again"),
        (has_steps, f"{name} and prompts: rows of several prompts are asked once: leave one out"),
    ):
        if is_so:
            raise InvalidJob(problem)


def check_prompts(options: RepairOptions, prompts: Sequence[object]) -> None:
    """Raise InvalidJob for token ids as prompts, behind which no reason can be written."""
    if options.check is not None and any(isinstance(prompt, list) for prompt in prompts):
        raise InvalidJob("check and a prompt of token ids: its reason is a text: give the prompt as a text")


def attempt_seed(seed: int, attempt: int) -> int:
    """Return the seed of a further attempt, which follows from the row's; 0 to 2**63 - 1."""
    digest = blake2b(f"{seed}:attempt {attempt}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def num_generated(sample: Completion) -> int:
    """Return the tokens that were generated for an answer, in all its attempts."""
    return sample.num_generated_tokens if isinstance(sample, Attempted) else len(sample.token_ids)
