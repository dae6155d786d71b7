"""OpenAI's response shapes, built from completions."""

from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from itertools import accumulate
from typing import Any

from jobs.prompts.attempts import Attempts, num_generated
from jobs.prompts.response_options import ResponseOptions
from jobs.tasks import Completion, Logprob

#: What stands for minus infinity, which JSON has not; vLLM's.
LOWEST = -9999.0
#: How a token is shown that is part of a character.
INCOMPLETE = "\ufffd"

TokenLogprobs = Mapping[int, Logprob]


def text_logprobs(sample: Completion, *, echo: bool, prompt_only: bool) -> dict[str, Any]:
    """Make `logprobs` of a text_completion's choice. echo: with the prompt's tokens; the first has none."""
    rows: list[tuple[str, TokenLogprobs | None]] = []
    if echo:
        of_prompt = sample.prompt_logprobs or [None] * len(sample.prompt_tokens or ())
        rows += zip(sample.prompt_tokens or (), of_prompt, strict=True)
    if not prompt_only:
        rows += [(_own(row).decoded_token, row) for row in sample.logprobs or ()]
    tokens = [token for token, _ in rows]
    return {
        "tokens": tokens,
        "token_logprobs": [None if row is None else _shown(_own(row)) for _, row in rows],
        "top_logprobs": [None if row is None else _by_text(row.values()) for _, row in rows],
        "text_offset": list(accumulate(map(len, tokens), initial=0))[:-1],
    }


def chat_logprobs(rows: Sequence[TokenLogprobs], num_top: int) -> dict[str, Any]:
    return {
        "content": [
            {
                **_entry(_own(row)),
                "top_logprobs": [
                    _entry(each) for each in sorted(row.values(), key=lambda each: each.rank) if each.rank <= num_top
                ],
            }
            for row in rows
        ],
        "refusal": None,
    }


def prompt_logprobs(rows: Sequence[TokenLogprobs | None]) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs` of a choice: for each token of the prompt, by token id."""
    return [
        None
        if row is None
        else {
            str(token_id): {"logprob": _shown(each), "rank": each.rank, "decoded_token": each.decoded_token}
            for token_id, each in row.items()
        }
        for row in rows
    ]


def _own(row: TokenLogprobs) -> Logprob:
    return next(iter(row.values()))


def _shown(each: Logprob) -> float:
    return max(each.logprob, LOWEST)


def _by_text(entries: Iterable[Logprob]) -> dict[str, float]:
    found: dict[str, float] = {}
    for each in sorted(entries, key=lambda each: each.rank):
        found.setdefault(each.decoded_token, _shown(each))
    return found


def _entry(each: Logprob) -> dict[str, Any]:
    token = each.decoded_token
    return {"token": token, "logprob": _shown(each), "bytes": None if INCOMPLETE in token else list(token.encode())}


def with_ids(calls: Sequence[Mapping[str, str]], seed: str) -> list[dict[str, Any]]:
    """OpenAI's `tool_calls`. seed: names the answer, so that ids are the same whenever it is given."""
    return [
        {
            "id": "call_" + blake2b(f"{seed}/{number}".encode(), digest_size=12).hexdigest(),
            "type": "function",
            "function": dict(function),
        }
        for number, function in enumerate(calls)
    ]


PLAIN = ResponseOptions()
#: The samples of each request, in request order; samples ordered by their index.
Answers = Sequence[Sequence[Completion]]


def text_completion(answers: Answers, job_id: str, options: ResponseOptions = PLAIN) -> dict[str, Any]:
    """Return a `text_completion`, choices over prompts, then samples; one that failed has the reason in `error`."""
    choices = []
    for number, sample in _numbered(answers):
        text = "" if options.prompt_only else sample.text
        choice = {"index": number, "text": (sample.prompt_text or "") + text, **_ending(sample)}
        if sample.error is None and options.num_top is not None:
            choice["logprobs"] = text_logprobs(sample, echo=options.echo, prompt_only=options.prompt_only)
        if sample.reasoning is not None:
            choice["reasoning"] = sample.reasoning
        choices.append(choice | _of_prompt(sample, options))
    used = usage(answers)
    if options.prompt_only:
        used |= {"completion_tokens": 0, "total_tokens": used["prompt_tokens"]}
    return {"object": "text_completion", "choices": choices, "usage": used}


def chat_completion(answers: Answers, job_id: str, options: ResponseOptions = PLAIN) -> dict[str, Any]:
    """Return a `chat.completion`, a choice for each sample."""
    choices = []
    for number, sample in _numbered(answers):
        choice = {"index": number, **_ending(sample)}
        message: dict[str, Any] = {"role": "assistant", "content": sample.text}
        if sample.reasoning is not None:
            message["reasoning"] = sample.reasoning
        if sample.tool_call_error is not None:
            choice["tool_call_error"] = sample.tool_call_error
        if sample.tool_calls:
            message["content"] = sample.text or None
            message["tool_calls"] = with_ids(sample.tool_calls, f"{job_id}/{number}")
            if sample.finish_reason == "stop":
                choice["finish_reason"] = "tool_calls"
        if sample.logprobs is not None and options.num_top is not None:
            choice["logprobs"] = chat_logprobs(sample.logprobs, options.num_top)
        choices.append({**choice, "message": message} | _of_prompt(sample, options))
    return {"object": "chat.completion", "choices": choices, "usage": usage(answers)}


def _numbered(answers: Answers) -> list[tuple[int, Completion]]:
    return list(enumerate(sample for samples in answers for sample in samples))


def _of_prompt(sample: Completion, options: ResponseOptions) -> dict[str, Any]:
    tried: dict[str, Any] = {}
    if isinstance(sample, Attempts):
        tried = {"attempts": sample.attempts, "check_error": sample.check_error}
    if options.echo or sample.prompt_logprobs is None:
        return tried
    return {"prompt_logprobs": prompt_logprobs(sample.prompt_logprobs), **tried}


def _ending(sample: Completion) -> dict[str, Any]:
    ending: dict[str, Any] = {"finish_reason": sample.finish_reason, "logprobs": None}
    return ending if sample.error is None else {**ending, "error": sample.error}


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
