"""OpenAI's response shapes, built from completions."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import RequestFailed
from ..tasks import Completion

#: The samples of each request, in request order; samples ordered by their index.
Answers = Sequence[Sequence[Completion]]


def text_completion(answers: Answers, *, job_id: str, model: str, created: int) -> dict[str, Any]:
    """Return a `text_completion`; choices run over prompts, then samples. created: Unix time in seconds.

    The choices of a prompt that failed have the finish_reason "error", no text, and the reason in `error`.
    """
    choices = [
        {"index": number, "text": sample.text, **_ending(sample)} for number, sample in _numbered(answers)
    ]
    return _response("cmpl", "text_completion", choices, answers, job_id, model, created)


def chat_completion(answers: Answers, *, job_id: str, model: str, created: int) -> dict[str, Any]:
    """Return a `chat.completion`, one choice for each sample. created: Unix time in seconds."""
    choices = [
        {"index": number, "message": {"role": "assistant", "content": sample.text}, **_ending(sample)}
        for number, sample in _numbered(answers)
    ]
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


def check_answers(answers: Answers) -> None:
    """Raise RequestFailed where every prompt failed; one of several fails its own choices only."""
    failures = [samples[0].error for samples in answers if samples[0].finish_reason == "error"]
    if len(failures) == len(answers):
        raise RequestFailed(0, failures[0])


def _numbered(answers: Answers) -> list[tuple[int, Completion]]:
    return list(enumerate(sample for samples in answers for sample in samples))


def _ending(sample: Completion) -> dict[str, Any]:
    ending = {"finish_reason": sample.finish_reason, "logprobs": None}
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
        "usage": _usage(answers),
    }


def _usage(answers: Answers) -> dict[str, Any]:
    """Count each prompt once, however many samples it has, as OpenAI does."""
    prompt_tokens = sum(samples[0].num_prompt_tokens for samples in answers)
    completion_tokens = sum(len(sample.token_ids) for samples in answers for sample in samples)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(samples[0].num_cached_tokens for samples in answers)},
    }
