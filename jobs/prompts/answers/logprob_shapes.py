"""OpenAI's shapes of log probabilities, of completions and of chats."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jobs.tasks import Completion, Logprob

#: What stands for minus infinity, which JSON has not; vLLM's.
LOWEST = -9999.0

#: What a token that is a part of a character is shown as.
INCOMPLETE = "\ufffd"

TokenLogprobs = Mapping[int, Logprob]


def text_logprobs(sample: Completion, *, echo: bool, prompt_only: bool) -> dict[str, Any]:
    """Make `logprobs` of a text_completion's choice. echo: with the prompt's tokens; the first has none.

    `text_offset` counts the characters of the tokens before.
    """
    rows: list[tuple[str, TokenLogprobs | None]] = []
    if echo:
        of_prompt = sample.prompt_logprobs or [None] * len(sample.prompt_tokens or ())
        rows += zip(sample.prompt_tokens or (), of_prompt, strict=True)
    if not prompt_only:
        rows += [(_own(row).decoded_token, row) for row in sample.logprobs or ()]
    offsets, length = [], 0
    for token, _ in rows:
        offsets.append(length)
        length += len(token)
    return {
        "tokens": [token for token, _ in rows],
        "token_logprobs": [None if row is None else _shown(_own(row)) for _, row in rows],
        "top_logprobs": [None if row is None else _by_text(row.values()) for _, row in rows],
        "text_offset": offsets,
    }


def chat_logprobs(rows: Sequence[TokenLogprobs], num_top: int) -> dict[str, Any]:
    """`logprobs` of a chat.completion's choice, with so many of the likeliest tokens beside each."""
    return {
        "content": [
            {
                **_entry(_own(row)),
                "top_logprobs": [
                    _entry(each)
                    for each in sorted(row.values(), key=lambda each: each.rank)
                    if each.rank <= num_top
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
    """Of the token that stands there: the engine names it first."""
    return next(iter(row.values()))


def _shown(each: Logprob) -> float:
    return max(each.logprob, LOWEST)


def _by_text(entries: Iterable[Logprob]) -> dict[str, float]:
    """By the tokens' texts; of several with one text the likeliest."""
    found: dict[str, float] = {}
    for each in sorted(entries, key=lambda each: each.rank):
        found.setdefault(each.decoded_token, _shown(each))
    return found


def _entry(each: Logprob) -> dict[str, Any]:
    token = each.decoded_token
    return {
        "token": token,
        "logprob": _shown(each),
        "bytes": None if INCOMPLETE in token else list(token.encode()),
    }
