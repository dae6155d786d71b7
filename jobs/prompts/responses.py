"""Makes OpenAI's responses from completions, and reads the arguments that say what a response shows."""

from codecs import getincrementaldecoder
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from jobs.errors import InvalidJob, wrong_value_error
from jobs.prompts.generated import PromptAnswer
from jobs.tasks import Completion, Logprob

#: Stands for minus infinity, which JSON does not have. vLLM writes the same number.
LOWEST = -9999.0

#: Stands in a text for bytes that never became a whole character.
INCOMPLETE = "\ufffd"

TokenLogprobs = Mapping[int, Logprob]
"""Log probabilities at one position of a text, by token id: first the token itself, then the likeliest tokens."""

MAX_TOP_LOGPROBS = 20
LOGPROBS = ("logprobs", "prompt_logprobs")
#: Arguments that say what a response shows.
RESPONSE_NAMES = ("echo", "top_logprobs", *LOGPROBS)


@dataclass(frozen=True)
class ResponseOptions:
    """What a response shows.

    echo: whether the prompt's text comes before the completion's. prompt_only: whether only the prompt's text is shown.
    num_top: how many likeliest tokens are shown with each token's log probability; None shows no log probabilities.
    """

    echo: bool = False
    prompt_only: bool = False
    num_top: int | None = None


def completion_options(values: Mapping[str, Any]) -> tuple[dict[str, Any], ResponseOptions]:
    """Return a completion's sampling values, and what its response shows. Raises InvalidJob."""
    sampling = {name: value for name, value in values.items() if name != "echo"}
    echo = values.get("echo") or False
    if not isinstance(echo, bool):
        raise wrong_value_error("echo", echo, "true or false")
    num_top = values.get("logprobs")
    if num_top is None or num_top is False:  # no log probabilities are asked for
        sampling.pop("logprobs", None)
        num_top = None
    elif type(num_top) is not int:
        raise wrong_value_error("logprobs", num_top, "a number of tokens")
    if not echo:
        return sampling, ResponseOptions(num_top=num_top)

    sampling["echo"] = True
    if num_top is not None:
        sampling["prompt_logprobs"] = num_top
    max_tokens = values.get("max_tokens")
    prompt_only = type(max_tokens) is int and max_tokens == 0
    if prompt_only:
        # The engine generates at least one token, which the response leaves out.
        sampling["max_tokens"] = 1
    return sampling, ResponseOptions(echo=True, prompt_only=prompt_only, num_top=num_top)


def chat_response_options(values: Mapping[str, Any]) -> tuple[dict[str, Any], ResponseOptions]:
    """Return a chat's sampling values, and what its response shows. Raises InvalidJob.

    The response shows the reasoning apart from the answer, unless `separate_reasoning` is false.
    """
    sampling = {
        name: value for name, value in values.items() if name not in ("echo", "top_logprobs")
    }
    if values.get("echo"):
        raise InvalidJob("echo belongs to jobs.complete: a chat's response holds the answer alone")
    sampling.setdefault("separate_reasoning", True)
    wants_logprobs = sampling.pop("logprobs", None)
    num_top = values.get("top_logprobs") or 0
    if wants_logprobs is not None and not isinstance(wants_logprobs, bool):
        raise wrong_value_error(
            "logprobs", wants_logprobs, "true or false: give a number as top_logprobs"
        )
    if num_top and not wants_logprobs:
        raise InvalidJob("top_logprobs needs logprobs=true")
    if not wants_logprobs:
        return sampling, ResponseOptions()
    if type(num_top) is not int or not 0 <= num_top <= MAX_TOP_LOGPROBS:
        raise wrong_value_error("top_logprobs", num_top, f"an integer from 0 to {MAX_TOP_LOGPROBS}")
    return {**sampling, "logprobs": num_top}, ResponseOptions(num_top=num_top)


def run_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's sampling values. Arguments about the response that are null or false are left out.

    Raises InvalidJob for an argument about the response with a value that a run cannot have.
    """
    remaining: dict[str, Any] = {}
    for name, value in values.items():
        is_off = name in RESPONSE_NAMES and (value is None or value is False)
        if not is_off:
            remaining[name] = value
    for name in LOGPROBS:
        num_top = remaining.get(name, 0)
        if type(num_top) is not int or not 0 <= num_top <= MAX_TOP_LOGPROBS:
            raise wrong_value_error(name, num_top, f"a number of tokens, 0 to {MAX_TOP_LOGPROBS}")
    if "echo" in remaining:
        raise InvalidJob("echo is not built for a run: its output has no column for it")
    return remaining


def text_logprobs(
    sample: Completion, text: str, *, echo: bool, prompt_only: bool
) -> dict[str, Any]:
    """Return `logprobs` of a text_completion's choice.

    A prompt's first token has no log probability. A token that is part of a character has OpenAI's form:
    "bytes:\\xe2\\x80".
    text: the choice's text, in which `text_offset` counts characters. echo, prompt_only: see ResponseOptions.
    """
    prompt_tokens: Sequence[str] = ()
    prompt_positions: Sequence[TokenLogprobs | None] = ()
    if echo:
        prompt_tokens = sample.prompt_tokens or ()
        prompt_positions = sample.prompt_logprobs or [None] * len(prompt_tokens)
    answer_positions: Sequence[TokenLogprobs] = ()
    if not prompt_only:
        answer_positions = sample.logprobs or ()

    shown_tokens: list[str] = []
    tokens_and_bytes: list[tuple[str, bytes | None]] = []  # for _text_offsets
    logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    answer_tokens = [_token_entry(position).decoded_token for position in answer_positions]
    all_tokens = [*prompt_tokens, *answer_tokens]
    all_positions = [*prompt_positions, *answer_positions]
    for token, position in zip(all_tokens, all_positions, strict=True):
        if position is None:  # this token has no log probability
            shown_tokens.append(token)
            tokens_and_bytes.append((token, None))
            logprobs.append(None)
            top_logprobs.append(None)
            continue
        entry = _token_entry(position)
        shown_tokens.append(text_token(entry))
        tokens_and_bytes.append((token, entry.partial_bytes))
        logprobs.append(_json_logprob(entry))
        top_logprobs.append(_by_text(position))
    return {
        "tokens": shown_tokens,
        "token_logprobs": logprobs,
        "top_logprobs": top_logprobs,
        "text_offset": _text_offsets(text, tokens_and_bytes),
    }


def _text_offsets(text: str, tokens: Iterable[tuple[str, bytes | None]]) -> list[int]:
    """Return the offset in characters at which each token of a text begins.

    A token that the text leaves out, such as a special token, takes no characters. A token that is part of a character
    begins where the character begins.
    tokens: the text of each token, and its bytes if the token is part of a character, else None.
    """
    offsets = []
    offset = 0
    decoder = getincrementaldecoder("utf-8")(errors="replace")
    for token, partial_bytes in tokens:
        has_whole_characters = partial_bytes is None and token != ""
        if has_whole_characters and text.startswith(INCOMPLETE + token, offset):
            # The bytes of the tokens before this one made no whole character, so the text has INCOMPLETE instead.
            offset += len(INCOMPLETE)
            decoder.reset()
        offsets.append(offset)
        characters = token if partial_bytes is None else decoder.decode(partial_bytes)
        offset = _offset_after(characters, text, offset)
    return offsets


def _offset_after(characters: str, text: str, offset: int) -> int:
    """Return the offset after `characters`, which begin at `offset` in a text; `offset` if the text lacks them."""
    if text.startswith(characters, offset):
        return offset + len(characters)
    if offset == 0 and characters.startswith(" ") and text.startswith(characters[1:]):
        # sentencepiece adds a space before a text, and removes it again.
        return len(characters) - 1
    return offset


def chat_logprobs(positions: Sequence[TokenLogprobs], num_top: int) -> dict[str, Any]:
    """Return `logprobs` of a chat.completion's choice. num_top: how many likeliest tokens are listed for each token."""
    content = []
    for position in positions:
        by_rank = sorted(position.values(), key=lambda entry: entry.rank)
        likeliest = [chat_token(entry) for entry in by_rank if entry.rank <= num_top]
        content.append({**chat_token(_token_entry(position)), "top_logprobs": likeliest})
    return {"content": content, "refusal": None}


def prompt_logprobs(positions: Sequence[TokenLogprobs | None]) -> list[dict[str, Any] | None]:
    """Return vLLM's `prompt_logprobs` of a choice: for each position of the prompt, log probabilities by token id."""
    entries_of_positions: list[dict[str, Any] | None] = []
    for position in positions:
        if position is None:
            entries_of_positions.append(None)
            continue
        entries = {}
        for token_id, entry in position.items():
            entries[str(token_id)] = {
                "logprob": _json_logprob(entry),
                "rank": entry.rank,
                "decoded_token": entry.decoded_token,
            }
        entries_of_positions.append(entries)
    return entries_of_positions


def _token_entry(position: TokenLogprobs) -> Logprob:
    """Return the entry of the token that is in the text. A position has this entry first, then the likeliest tokens."""
    return next(iter(position.values()))


def _json_logprob(entry: Logprob) -> float:
    """Return a token's log probability; LOWEST in place of minus infinity, which JSON does not have."""
    return max(entry.logprob, LOWEST)


def _by_text(position: TokenLogprobs) -> dict[str, float]:
    """Return the log probabilities at a position by the tokens' texts, the likeliest first.

    If a likelier token has the same text, the key is "token_id:" and the token's id.
    """
    by_text: dict[str, float] = {}
    likeliest_first = sorted(position, key=lambda token_id: position[token_id].rank)
    for token_id in likeliest_first:
        entry = position[token_id]
        key = text_token(entry)
        if key in by_text:
            key = f"token_id:{token_id}"
        by_text[key] = _json_logprob(entry)
    return by_text


def text_token(entry: Logprob) -> str:
    """Return a token in the form of `text_completion`. A token that is only part of a character becomes its bytes."""
    if entry.partial_bytes is None:
        return entry.decoded_token
    escapes = [f"\\x{byte:02x}" for byte in entry.partial_bytes]
    return "bytes:" + "".join(escapes)


def chat_token(entry: Logprob) -> dict[str, Any]:
    """Return a token in the form of `chat.completion`. A part of a character is shown as escaped bytes."""
    if entry.partial_bytes is None:
        token = entry.decoded_token
        token_bytes = token.encode()
    else:
        token = entry.partial_bytes.decode(errors="backslashreplace")
        token_bytes = entry.partial_bytes
    return {"token": token, "logprob": _json_logprob(entry), "bytes": list(token_bytes)}


def with_ids(calls: Sequence[Mapping[str, str]], seed: str) -> list[dict[str, Any]]:
    """Return calls as OpenAI's `tool_calls`, with ids.

    seed: a text that names the answer. The ids are hashes of this text, so a repeated answer has the same ids.
    """
    tool_calls = []
    for number, function in enumerate(calls):
        digest = blake2b(f"{seed}/{number}".encode(), digest_size=12).hexdigest()
        tool_calls.append({"id": f"call_{digest}", "type": "function", "function": dict(function)})
    return tool_calls


def finish_reason_of(sample: Completion) -> str:
    """Return why a sample ended, in OpenAI's words. For a sample that calls tools, this is `tool_calls`."""
    if sample.tool_calls and sample.finish_reason == "stop":
        return "tool_calls"
    return sample.finish_reason


PLAIN = ResponseOptions()
#: The answers of a job's prompts, in the order of the prompts.
Answers = Sequence[PromptAnswer]


def text_completion(
    answers: Answers, job_id: str, options: ResponseOptions = PLAIN
) -> dict[str, Any]:
    """Return a `text_completion`, with choices in the order of prompts and samples. A failed choice has an `error`."""
    choices = []
    for number, answer, sample in _numbered(answers):
        text = sample.prompt_text or ""
        if not options.prompt_only:
            text += sample.text
        choice = {"index": number, "text": text, **_ending(sample)}
        if sample.error is None and options.num_top is not None:
            choice["logprobs"] = text_logprobs(
                sample, text, echo=options.echo, prompt_only=options.prompt_only
            )
        if sample.reasoning is not None:
            choice["reasoning"] = sample.reasoning
        choices.append({**choice, **_prompt_values(answer, sample, options)})
    token_counts = usage(answers)
    if options.prompt_only:
        # The engine has generated a token, which the response leaves out.
        token_counts |= {"completion_tokens": 0, "total_tokens": token_counts["prompt_tokens"]}
    return {"object": "text_completion", "choices": choices, "usage": token_counts}


def chat_completion(
    answers: Answers, job_id: str, options: ResponseOptions = PLAIN
) -> dict[str, Any]:
    """Return a `chat.completion` with a choice for each sample."""
    choices = []
    for number, answer, sample in _numbered(answers):
        choice = {"index": number, **_ending(sample)}
        message: dict[str, Any] = {"role": "assistant", "content": sample.text}
        if sample.reasoning is not None:
            message["reasoning"] = sample.reasoning
        if sample.tool_call_error is not None:
            choice["tool_call_error"] = sample.tool_call_error
        if sample.tool_calls:
            message["content"] = sample.text or None
            message["tool_calls"] = with_ids(sample.tool_calls, f"{job_id}/{number}")
        if sample.logprobs is not None and options.num_top is not None:
            choice["logprobs"] = chat_logprobs(sample.logprobs, options.num_top)
        prompt_values = _prompt_values(answer, sample, options)
        choices.append({**choice, "message": message, **prompt_values})
    return {"object": "chat.completion", "choices": choices, "usage": usage(answers)}


def _numbered(answers: Answers) -> Iterator[tuple[int, PromptAnswer, Completion]]:
    """Yield each choice's number, its prompt's answer, and its sample."""
    number = 0
    for answer in answers:
        for sample in answer.samples:
            yield number, answer, sample
            number += 1


def _prompt_values(
    answer: PromptAnswer, sample: Completion, options: ResponseOptions
) -> dict[str, Any]:
    """Return a choice's fields about its prompt: log probabilities, attempts, and the values that a Way adds."""
    values: dict[str, Any] = {}
    if sample.prompt_logprobs is not None and not options.echo:
        values["prompt_logprobs"] = prompt_logprobs(sample.prompt_logprobs)
    if answer.attempts:
        values["attempts"] = answer.attempts
        values["check_error"] = answer.check_error
    return {**values, **answer.extras}


def _ending(sample: Completion) -> dict[str, Any]:
    """Return the fields that say how a choice ended."""
    ending: dict[str, Any] = {"finish_reason": finish_reason_of(sample), "logprobs": None}
    if sample.error is not None:
        ending["error"] = sample.error
    return ending


def usage(answers: Answers) -> dict[str, Any]:
    """Return a response's token counts. A prompt counts once, even if it has several samples, as with OpenAI."""
    prompt_tokens = 0
    cached_tokens = 0
    completion_tokens = 0
    for answer in answers:
        prompt_tokens += answer.first.num_prompt_tokens
        cached_tokens += answer.first.num_cached_tokens
        completion_tokens += sum(answer.num_generated)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
