"""What a template of any kind looks like from outside."""

from __future__ import annotations

from typing import Any

from jobs.errors import InvalidJob

#: The template is part of a run's job and of its plan; each of a million rows repeats it.
MAX_TEMPLATE_CHARS = 1 << 18
MAX_TEMPLATE_MESSAGES = 100


def template_texts(template: Any) -> tuple[list[str], tuple[str, ...] | None]:
    """Return the texts of a template of any kind and, for a chat, their roles. Raises InvalidJob."""
    if isinstance(template, str):
        _check_size(len(template))
        return [template], None
    if not isinstance(template, list) or not template:
        raise InvalidJob("template must be a text or a non-empty list of {'role': ..., 'content': ...}")
    if len(template) > MAX_TEMPLATE_MESSAGES:
        raise InvalidJob(
            f"the template has {len(template)} messages, more than the limit of {MAX_TEMPLATE_MESSAGES}: "
            "shorten it"
        )
    for number, message in enumerate(template):
        if not isinstance(message, dict) or message.keys() != {"role", "content"}:
            raise InvalidJob(f"message {number} of the template must hold exactly 'role' and 'content'")
        if not all(isinstance(value, str) for value in message.values()):
            raise InvalidJob(f"message {number} of the template: role and content must be strings")
    _check_size(sum(len(value) for message in template for value in message.values()))
    return [message["content"] for message in template], tuple(message["role"] for message in template)


def _check_size(chars: int) -> None:
    if chars > MAX_TEMPLATE_CHARS:
        raise InvalidJob(
            f"the template has {chars} characters, more than the limit of {MAX_TEMPLATE_CHARS}: shorten it, "
            "or write the long part into a column"
        )
