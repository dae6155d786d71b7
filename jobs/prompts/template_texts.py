"""Checks the texts of templates, and has child processes compile and render Jinja's templates."""

import re
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any

from jobs.context.shared_files import CHILDREN
from jobs.errors import InvalidJob, InvalidValue, check_limit
from sandbox import ChildFailed, Limits

#: The most characters of a template. A template stands in a run's job and plan, and each of a million rows repeats it.
MAX_TEMPLATE_CHARS = 1 << 18
#: The most messages of a chat's template.
MAX_TEMPLATE_MESSAGES = 100


def template_texts(template: Any) -> tuple[list[str], tuple[str, ...] | None]:
    """Return a template's texts, and the texts' roles. The roles are None if the template is not a chat.

    The texts may be in any template language. Raises InvalidJob.
    """
    texts = [template]
    roles: tuple[str, ...] | None = None
    num_chars = 0
    if not isinstance(template, str):
        texts, roles = _messages(template)
        num_chars += sum(map(len, roles))
    num_chars += sum(map(len, texts))
    remedy = "shorten it, or write the long part into a column"
    check_limit(num_chars, MAX_TEMPLATE_CHARS, "the template has {} characters", remedy)
    return texts, roles


def _messages(template: Any) -> tuple[list[str], tuple[str, ...]]:
    """Return the texts and roles of a chat's template. Raises InvalidJob."""
    if not isinstance(template, list) or not template:
        raise InvalidJob(
            "template must be a text or a non-empty list of {'role': ..., 'content': ...}"
        )
    check_limit(len(template), MAX_TEMPLATE_MESSAGES, "the template has {} messages", "shorten it")
    texts = []
    roles = []
    for number, message in enumerate(template):
        if not isinstance(message, dict) or message.keys() != {"role", "content"}:
            raise InvalidJob(
                f"message {number} of the template must hold exactly 'role' and 'content'"
            )
        if not all(isinstance(value, str) for value in message.values()):
            raise InvalidJob(f"message {number} of the template: role and content must be strings")
        texts.append(message["content"])
        roles.append(message["role"])
    return texts, tuple(roles)


#: These characters are put into a control token that stands in a value, or that begins at the value's end. Because of
#: them, engine.text.control_tokens reads the token's characters as plain text.
BREAK = "\ufdd0\ufdd1"


def with_breaks(value: Any, control_tokens: Collection[str]) -> Any:
    """Return a value of a template with BREAK in each control token, so that the token's characters stay text.

    value: a text, or lists and dicts of texts. control_tokens: the texts of the model's control tokens.
    """
    if not control_tokens:
        return value
    return _token_breaker(tuple(control_tokens)).broken(value)


class _TokenBreaker:
    """Puts BREAK into the control tokens of a text, so that the engine reads them as plain text.

    The beginning of a token at the text's end gets a BREAK too, because a following text could complete the token.
    texts: the texts of the control tokens.
    """

    def __init__(self, texts: Collection[str]) -> None:
        longest_first = sorted(texts, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)))
        self._beginnings: set[str] = set()  # each beginning of a token, without the whole token
        for text in texts:
            for length in range(1, len(text)):
                self._beginnings.add(text[:length])
        self._max_length = max(map(len, self._beginnings), default=0)

    def broken(self, value: Any) -> Any:
        """Return a value with BREAK in each control token of its texts."""
        if isinstance(value, str):
            # One pass is not enough, because a token may stand within another token.
            while self._pattern.search(value):
                value = self._pattern.sub(lambda match: _with_break(match[0], 1), value)
            return self._broken_end(value)
        if isinstance(value, dict):
            return {self.broken(key): self.broken(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.broken(item) for item in value]
        return value

    def _broken_end(self, text: str) -> str:
        """Return a text with BREAK in each token that begins near the text's end and is cut off there."""
        broken = text
        first_start = max(len(text) - self._max_length, 0)
        # The loop goes backwards, because an inserted BREAK shifts the text after it.
        for start in reversed(range(first_start, len(text))):
            if text[start:] in self._beginnings:
                broken = _with_break(broken, start + 1)  # after the token's first character
        return broken


def _with_break(text: str, index: int) -> str:
    """Return a text with BREAK before the character at this index."""
    return text[:index] + BREAK + text[index:]


@lru_cache(maxsize=4)
def _token_breaker(control_tokens: tuple[str, ...]) -> _TokenBreaker:
    """Return the breaker of these tokens. The last breakers are cached."""
    return _TokenBreaker(control_tokens)


def without_breaks(prompt: Any) -> Any:
    """Return a prompt without BREAK, for people to read. A prompt that is no text is returned as it is."""
    return prompt.replace(BREAK, "") if isinstance(prompt, str) else prompt


#: The most seconds that a child may take for a template.
LIMIT_S = 2.0
_TASK = "jobs.prompts.jinja_environment:fill_in"


class TemplateProblem(Exception):
    """Raised when a template or a row cannot be rendered.

    Its arguments are those of InvalidValue: a message that may have one {}, and the part of the template that takes the
    place of the {}.
    """


class JinjaTexts:
    """A prompt's Jinja template, or the templates of a chat's messages. Raises InvalidValue if one cannot be compiled.

    names: the variables that the templates use and do not set themselves.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = list(texts)
        try:
            reply = _ask_child(texts=self.texts)
        except TemplateProblem as problem:
            raise InvalidValue(*problem.args) from None
        self.names = frozenset(reply["names"])

    def render(self, values: Mapping[str, Any]) -> list[str]:
        """Have a child process render the templates with these values. Raises TemplateProblem."""
        reply = _ask_child(texts=self.texts, values=values)
        return list(reply["texts"])


def _ask_child(**question: Any) -> dict[str, Any]:
    """Ask a child process about templates, and return its reply. Raises TemplateProblem."""
    try:
        reply, _ = CHILDREN.call(lambda child: child.ask(_TASK, question, Limits(LIMIT_S)))
    except ChildFailed as error:
        raise TemplateProblem(f"the template {error}") from None
    if "problem" in reply:
        raise TemplateProblem(*reply["problem"])
    return reply
