"""OpenAI's response shapes, built from completions."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from itertools import accumulate
from typing import Any

from jobs.common.display import is_unicode
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


OPEN = "<tool_call>"
_CLOSED = re.compile(r"\s*(</tool_call>|\Z)")
LLAMA_TAG = "<|python_tag|>"
_DECODER = json.JSONDecoder()


def parse_tool_calls(text: str) -> tuple[list[dict[str, Any]], str]:
    """Return the functions that a text calls, as {'name', 'arguments': their JSON}, and what is left of it."""
    calls, content = _hermes(text)
    if calls:
        return calls, content.strip()
    calls = _llama(text)
    return (calls, "") if calls else ([], text)


def with_ids(calls: list[dict[str, Any]], seed: str) -> list[dict[str, Any]]:
    """OpenAI's `tool_calls`. seed: names the answer, so that ids are the same whenever it is given."""
    return [
        {
            "id": "call_" + blake2b(f"{seed}/{number}".encode(), digest_size=12).hexdigest(),
            "type": "function",
            "function": function,
        }
        for number, function in enumerate(calls)
    ]


def _hermes(text: str) -> tuple[list[dict[str, Any]], str]:
    calls, kept, at = [], [], 0
    while (place := text.find(OPEN, at)) >= 0:
        kept.append(text[at:place])
        at = place + len(OPEN)
        value, end = _value_at(text, at) or (None, at)
        function, closed = _function(value), _CLOSED.match(text, end)
        if function is None or closed is None:
            kept.append(OPEN)
            continue
        calls.append(function)
        at = closed.end()
    return calls, "".join((*kept, text[at:]))


def _llama(text: str) -> list[dict[str, Any]]:
    text = text.strip().removeprefix(LLAMA_TAG).strip()
    calls, at = [], 0
    while at < len(text):
        value, at = _value_at(text, at) or (None, at)
        for each in value if isinstance(value, list) else [value]:
            if (function := _function(each)) is None:
                return []
            calls.append(function)
        while at < len(text) and (text[at].isspace() or text[at] == ";"):
            at += 1
    return calls


def _value_at(text: str, at: int) -> tuple[Any, int] | None:
    while at < len(text) and text[at].isspace():
        at += 1
    try:
        return _DECODER.raw_decode(text, at)
    except (ValueError, RecursionError):
        return None


def _function(call: Any) -> dict[str, Any] | None:
    if not isinstance(call, Mapping) or not isinstance(call.get("name"), str) or not call["name"]:
        return None
    arguments = call.get("arguments", call.get("parameters"))
    if isinstance(arguments, str):
        found = _value_at(arguments, 0)
        arguments = None if found is None or arguments[found[1] :].strip() else found[0]
    if not isinstance(arguments, Mapping) or not is_unicode(call["name"]):
        return None
    try:
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except ValueError:  # NaN, or a number beyond all that JSON's readers hold
        return None
    # half of a surrogate pair, which a model may write as an escape, stays one: no file takes it otherwise
    return {"name": call["name"], "arguments": written if is_unicode(written) else json.dumps(arguments)}


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


def chat_completion(
    answers: Answers, job_id: str, options: ResponseOptions = PLAIN, has_tools: bool = False
) -> dict[str, Any]:
    """Return a `chat.completion`, a choice for each sample. has_tools: calls of tools in a text become `tool_calls`."""
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
