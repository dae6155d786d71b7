"""OpenAI's response shapes, built from completions."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jobs.errors import RequestFailed
from jobs.prompts.answers.logprob_shapes import chat_logprobs, prompt_logprobs, text_logprobs
from jobs.prompts.answers.response_options import ResponseOptions
from jobs.prompts.answers.tool_calls import parse_tool_calls, with_ids
from jobs.prompts.attempts import Attempted, num_generated
from jobs.tasks import Completion

PLAIN = ResponseOptions()

#: The samples of each request, in request order; samples ordered by their index.
Answers = Sequence[Sequence[Completion]]


def text_completion(
    answers: Answers, *, job_id: str, model: str, created: int, options: ResponseOptions = PLAIN
) -> dict[str, Any]:
    """Return a `text_completion`; choices run over prompts, then samples. created: Unix time in seconds.

    The choices of a prompt that failed have the finish_reason "error", no text, and the reason in `error`.
    """
    choices = []
    for number, sample in _numbered(answers):
        text = "" if options.prompt_only else sample.text
        choice = {"index": number, "text": (sample.prompt_text or "") + text, **_ending(sample)}
        if sample.error is None and options.num_top is not None:
            choice["logprobs"] = text_logprobs(sample, echo=options.echo, prompt_only=options.prompt_only)
        if sample.reasoning is not None:
            choice["reasoning"] = sample.reasoning
        choices.append(choice | _of_prompt(sample, options))
    response = _response("cmpl", "text_completion", choices, answers, job_id, model, created)
    if options.prompt_only:
        usage = response["usage"]
        response["usage"] = usage | {"completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
    return response


def chat_completion(
    answers: Answers,
    *,
    job_id: str,
    model: str,
    created: int,
    options: ResponseOptions = PLAIN,
    has_tools: bool = False,
) -> dict[str, Any]:
    """Return a `chat.completion`, one choice for each sample. created: Unix time in seconds.

    has_tools: calls of tools in a text become `tool_calls`. A message has its `reasoning` where there is any.
    """
    choices = []
    for number, sample in _numbered(answers):
        choice = {"index": number, **_ending(sample)}
        message: dict[str, Any] = {"role": "assistant", "content": sample.text}
        if sample.reasoning is not None:
            message["reasoning"] = sample.reasoning
        calls, content = parse_tool_calls(sample.text) if has_tools else ([], sample.text)
        if calls:
            message["content"] = content or None
            message["tool_calls"] = with_ids(calls, f"{job_id}/{number}")
            if sample.finish_reason == "stop":
                choice["finish_reason"] = "tool_calls"
        if sample.logprobs is not None and options.num_top is not None:
            choice["logprobs"] = chat_logprobs(sample.logprobs, options.num_top)
        choices.append({**choice, "message": message} | _of_prompt(sample, options))
    return _response("chatcmpl", "chat.completion", choices, answers, job_id, model, created)


@dataclass(frozen=True)
class FailedCompletion:
    """A sample of a prompt that failed."""

    error: str
    index: int = 0
    token_ids: Sequence[int] = ()
    text: str = ""
    finish_reason: str = "error"
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    logprobs: None = None
    prompt_logprobs: None = None
    reasoning: None = None
    prompt_text: None = None
    prompt_tokens: None = None
    loglikelihoods: None = None
    embedding: None = None


def check_answers(answers: Answers) -> None:
    """Raise RequestFailed where every prompt failed; one of several fails its own choices only."""
    failures = [samples[0].error for samples in answers if samples[0].finish_reason == "error"]
    if len(failures) == len(answers):
        raise RequestFailed(0, failures[0])


def _numbered(answers: Answers) -> list[tuple[int, Completion]]:
    return list(enumerate(sample for samples in answers for sample in samples))


def _of_prompt(sample: Completion, options: ResponseOptions) -> dict[str, Any]:
    """vLLM's `prompt_logprobs`, where they were asked for by that name; what its attempts came to."""
    tried: dict[str, Any] = {}
    if isinstance(sample, Attempted):
        tried = {"attempts": sample.attempts, "check_error": sample.check_error}
    if options.echo or sample.prompt_logprobs is None:
        return tried
    return {"prompt_logprobs": prompt_logprobs(sample.prompt_logprobs), **tried}


def _ending(sample: Completion) -> dict[str, Any]:
    ending: dict[str, Any] = {"finish_reason": sample.finish_reason, "logprobs": None}
    return ending if sample.error is None else {**ending, "error": sample.error}


def _response(
    prefix: str,
    kind: str,
    choices: list[dict[str, Any]],
    answers: Answers,
    job_id: str,
    model: str,
    created: int,
) -> dict[str, Any]:
    return {
        "id": f"{prefix}-{job_id}",
        "object": kind,
        "created": created,
        "model": model,
        "choices": choices,
        "usage": usage(answers),
    }


def usage(answers: Answers) -> dict[str, Any]:
    """Count each prompt once, however many samples it has, as OpenAI does."""
    prompt_tokens = sum(samples[0].num_prompt_tokens for samples in answers)
    completion_tokens = sum(num_generated(sample) for samples in answers for sample in samples)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(samples[0].num_cached_tokens for samples in answers)},
    }
