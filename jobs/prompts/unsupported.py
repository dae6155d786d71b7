"""Leaves unsupported arguments out of a batch file's line, for runs that ask for that."""

from collections.abc import Callable, Mapping
from typing import Any

from jobs.context.checks import REPAIR_OPTIONS
from jobs.prompts import openai_responses
from jobs.prompts.arguments import FOR_OPERATORS, NEUTRAL, OF_CHATS, OF_VALUES, is_neutral
from jobs.prompts.messages import MESSAGE_KEYS
from jobs.prompts.scoring.embeddings import ARGUMENTS as EMBEDDING_ARGUMENTS
from jobs.prompts.ways.table import WAY_OPTIONS

COMPLETIONS, CHATS, EMBEDDINGS = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"

#: Arguments that are turned into other arguments before the engine sees them.
_TEXTS = {"model", "max_completion_tokens", "response_format", "allow_whitespace", OF_VALUES}
_KNOWN: Mapping[str, set[str]] = {
    COMPLETIONS: {"prompt", "echo", *_TEXTS, *REPAIR_OPTIONS, *WAY_OPTIONS},
    CHATS: {"messages", "top_logprobs", *OF_CHATS, *_TEXTS, *REPAIR_OPTIONS, *WAY_OPTIONS},
    EMBEDDINGS: set(EMBEDDING_ARGUMENTS),
}


def without_unsupported(
    url: str, body: Mapping[str, Any], is_sampling_value: Callable[[str], bool]
) -> tuple[dict[str, Any], list[str]]:
    """Return a line's body without arguments that are not served, and the names of the arguments that were left out.

    A key of messages has the name `messages[].key`. is_sampling_value: whether the engine knows a sampling value.
    """
    supported: dict[str, Any] = {}
    left_out: list[str] = []
    for name, value in body.items():
        if value is None or _is_supported(url, name, body, is_sampling_value):
            supported[name] = value
        else:
            left_out.append(name)
    messages = supported.get("messages")
    if url == CHATS and isinstance(messages, list):
        keys: dict[str, None] = {}
        supported["messages"] = [_without_keys(message, keys) for message in messages]
        left_out += [f"messages[].{key}" for key in keys]
    return supported, left_out


def _is_supported(
    url: str, name: str, body: Mapping[str, Any], is_sampling_value: Callable[[str], bool]
) -> bool:
    value = body[name]
    if name in NEUTRAL:
        return is_neutral(name, value, body)
    if url == openai_responses.PATH:
        return openai_responses.is_served(name, value)
    if name in FOR_OPERATORS or name in _KNOWN[url]:
        return True
    is_for_others = url == EMBEDDINGS or name in OF_CHATS
    return not is_for_others and is_sampling_value(name)


def _without_keys(message: Any, left_out: dict[str, None]) -> Any:
    """Return a message without keys that are not read. Their names are added to left_out."""
    if not isinstance(message, dict):
        return message
    remaining = {}
    for key, value in message.items():
        if key in MESSAGE_KEYS:
            remaining[key] = value
        elif value is not None and value != []:
            left_out[key] = None
    return remaining
