"""The texts of a template. Child processes compile and render Jinja's templates."""

import re
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any

from jobs.context.shared_files import CHILDREN
from jobs.errors import InvalidJob, InvalidValue, check_limit
from sandbox import ChildFailed, Limits

#: The limits of a template. It stands in a run's job and plan, and each of a million rows repeats it.
MAX_TEMPLATE_CHARS = 1 << 18
MAX_TEMPLATE_MESSAGES = 100


def template_texts(template: Any) -> tuple[list[str], tuple[str, ...] | None]:
    """Return the texts of a template of any kind and, for a chat, their roles. Raises InvalidJob."""
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


#: These characters are put into a control token that a value spells or begins. Then engine.text.control_tokens reads
#: the token's characters as text.
BREAK = "\ufdd0\ufdd1"


def as_values(value: Any, control_tokens: Collection[str]) -> Any:
    """Return a template's values with BREAK in each control token that they spell, so that the token stays text."""
    if not control_tokens:
        return value
    return _spellings(tuple(control_tokens)).broken(value)


class _Spellings:
    """Finds the control tokens that a value spells: whole ones, and the beginning of one at the value's end."""

    def __init__(self, texts: Collection[str]) -> None:
        longest_first = sorted(texts, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)))
        self._beginnings = set()  # each beginning of a token that is not the whole token
        for text in texts:
            self._beginnings |= {text[:length] for length in range(1, len(text))}
        self._longest = max(map(len, self._beginnings), default=0)

    def broken(self, value: Any) -> Any:
        """Return a value with BREAK in each control token that its texts spell."""
        if isinstance(value, str):
            while self._pattern.search(value):  # again, because a token may be within another one
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
        first_start = max(len(text) - self._longest, 0)
        for start in reversed(range(first_start, len(text))):  # so that earlier places stay right
            if text[start:] in self._beginnings:
                broken = _with_break(broken, start + 1)  # behind the token's first character
        return broken


def _with_break(text: str, place: int) -> str:
    """Return a text with BREAK at this place."""
    return text[:place] + BREAK + text[place:]


@lru_cache(maxsize=4)
def _spellings(control_tokens: tuple[str, ...]) -> _Spellings:
    """Return what finds these tokens. The last ones are remembered."""
    return _Spellings(control_tokens)


def as_shown(prompt: Any) -> Any:
    """Return a prompt without BREAK, for people to read."""
    return prompt.replace(BREAK, "") if isinstance(prompt, str) else prompt


#: The seconds that a child may take for a template.
LIMIT_S = 2.0
_TASK = "jobs.prompts.jinja_environment:fill_in"


class TemplateProblem(Exception):
    """Raised when a template or a row cannot be rendered.

    Its arguments are those of InvalidValue: a text that says why and may have one {}, and the part of the template that
    belongs there.
    """


class JinjaTexts:
    """A prompt's text, or the contents of a chat's messages. names: the names that the texts take from outside."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = list(texts)
        try:
            reply = _asked_child(texts=self.texts)
        except TemplateProblem as problem:
            raise InvalidValue(*problem.args) from None
        self.names = frozenset(reply["names"])

    def render(self, values: Mapping[str, Any]) -> list[str]:
        """Have a child render the texts. Raises the child's errors."""
        return list(_asked_child(texts=self.texts, values=values)["texts"])


def _asked_child(**question: Any) -> dict[str, Any]:
    """Return a child's reply about a template. Raises TemplateProblem."""
    try:
        reply, _ = CHILDREN.call(lambda child: child.ask(_TASK, question, Limits(LIMIT_S)))
    except ChildFailed as error:
        raise TemplateProblem(f"the template {error}") from None
    if "problem" in reply:
        raise TemplateProblem(*reply["problem"])
    return reply
