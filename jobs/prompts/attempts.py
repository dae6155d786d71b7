"""The way of a prompt to an answer that stands: it is checked, asked for again, or goes on where it was cut.

What follows depends on the prompt, its seed and its answers alone: another worker that begins anew takes the same way.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any

from jobs.common.display import brief
from jobs.context.checks import DEFAULT_MAX_ATTEMPTS, Checks, RepairOptions
from jobs.errors import InvalidJob, InvalidValue
from jobs.prompts.template_texts import as_values
from jobs.tasks import Completion, Logprob, Request

#: Sampling values of a prompt's first request alone.
_OF_PROMPT = ("echo", "prompt_logprobs")


class Attempts:
    """One prompt: for each request `inspect` in any thread, then `deliver`; what stands in the end is read of it.

    check_error: why the last answer is not valid, None where it is, or where nothing checks it. error: why an attempt
    failed. num_prompt_tokens, num_cached_tokens, num_generated_tokens: of all attempts together; what an answer that
    goes on has already is of its prompt then. The rest is that of the answer, the prompt's own of the first one.

    control_tokens: texts that answers and reasons behind a text prompt must not forge; a chat's are the engine's to see
    to.
    """

    def __init__(
        self, request: Request, row: Any, options: RepairOptions, checks: Checks, control_tokens: Collection[str] = ()
    ) -> None:
        self._request, self._row, self._options, self._checks = request, row, options, checks
        self._control_tokens = control_tokens
        self._seed = request.sampling.get("seed")
        self.attempts = 1
        self.check_error: str | None = None
        self._first: Completion | None = None
        self._answer: Completion | None = None
        self._continued: Sequence[int] = ()
        self._logprobs: list[Mapping[int, Logprob]] = []
        self._error: str | None = None
        self.num_prompt_tokens = self.num_cached_tokens = self.num_generated_tokens = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._first if name.startswith("prompt_") else self._answer or self._first, name)

    @property
    def error(self) -> str | None:
        found: str | None = self._error or getattr(self._answer or self._first, "error", None)
        return found

    @property
    def logprobs(self) -> Sequence[Mapping[int, Logprob]] | None:
        return None if getattr(self._answer, "logprobs", None) is None else self._logprobs

    def inspect(self, completion: Completion) -> None:
        """Check an answer that may stand. Raises InvalidJob for a check that can check nothing."""
        answer: Completion | None = completion
        if completion.finish_reason == "error":  # the one before stands, and was not checked where it was cut
            answer = self._answer if self._continued else None
        if answer is not None and self._options.check is not None and not self._goes_on(completion):
            self.check_error = self._checks.reason(self._options, self._row, answer.text)

    def deliver(self, completion: Completion) -> Request | None:
        """Take an answer; return what to ask next, or None once an answer stands."""
        following = self._following(completion)
        if following is None:
            del self._request, self._row  # or a job's answers would keep its prompts
        return following

    def _following(self, completion: Completion) -> Request | None:
        self._first = self._first or completion
        self.num_prompt_tokens += completion.num_prompt_tokens + len(self._continued)
        self.num_cached_tokens += completion.num_cached_tokens
        if completion.finish_reason == "error":  # the answer before stands, beside an error if it is not valid
            if self._answer is not None and not self._continued:
                self._error = f"attempt {self.attempts} failed: {completion.error or 'the engine gave no reason'}"
            return None
        self.num_generated_tokens += len(completion.token_ids) - len(self._continued)
        if not self._continued:
            self._logprobs = []
        self._logprobs += completion.logprobs or ()
        self._answer = completion
        goes_on = self._goes_on(completion)
        if not goes_on and (self.check_error is None or self.attempts == self._options.max_attempts):
            return None
        self.attempts += 1
        if goes_on:
            self._continued = completion.token_ids
            return replace(self._request, continued=self._continued, sampling=self._sampling({}))
        self._continued = ()
        self._request = self._repair(completion.text)
        return self._request

    def _goes_on(self, completion: Completion) -> bool:
        return (
            self._options.continue_on_length
            and completion.finish_reason == "length"
            and self.attempts < self._options.max_attempts
        )

    def _repair(self, text: str) -> Request:
        """Return what asks for another answer than `text`, behind all that was asked and answered."""
        assert self.check_error is not None
        request, is_chat = self._request, self._request.messages is not None
        seed = {} if self._seed is None else {"seed": hashed_seed(f"{self._seed}:attempt {self.attempts}")}
        asked = replace(request, sampling=self._sampling(seed))
        if request.messages is not None:
            behind = self._options.text_behind(self.check_error, is_chat)
            answer = {"role": "assistant", "content": text}
            return replace(asked, messages=[*request.messages, answer, {"role": "user", "content": behind}])
        assert request.prompt is not None
        text, reason = as_values([text, self.check_error], self._control_tokens)
        behind = self._options.text_behind(reason, is_chat)
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
    if options.repair_template is not None and options.check is None:
        raise InvalidJob("repair_template asks for a valid answer, and there is no check: give one too")
    if not options.is_asked_for:
        if options.max_attempts != DEFAULT_MAX_ATTEMPTS:
            raise InvalidJob("max_attempts is for answers that are tried again: give a check, or continue_on_length")
        return
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


def hashed_seed(text: str) -> int:
    """Return a seed that follows from a text; 0 to 2**63 - 1."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def num_generated(sample: Completion) -> int:
    return sample.num_generated_tokens if isinstance(sample, Attempts) else len(sample.token_ids)
