"""Prompts from a template: `{column}` stands for the row's value, `{{` and `}}` for braces."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from string import Formatter
from typing import Any

from jobs.common.display import MAX_NAME_CHARS
from jobs.errors import InvalidJob
from jobs.prompts.templates.template_texts import template_texts

#: Literals and values that a shard's prompts are put together from: some seconds of a thread.
MAX_SHARD_PIECES = 20_000_000

#: A text cut into (literal, column that follows it or None).
Pieces = tuple[tuple[str, str | None], ...]


@dataclass(frozen=True)
class Template:
    """A text, or a chat whose message contents are such texts.

    Only plain column names may stand in braces: no attribute, index, conversion or format, because the
    template is part of a job and a job is not trusted. A value is never parsed again, so braces in the data
    are harmless.
    """

    texts: tuple[Pieces, ...]
    roles: tuple[str, ...] | None  # None: a single prompt text

    @classmethod
    def parse(cls, template: Any) -> Template:
        """Parse a text, or a list of {'role', 'content'} with texts as content. Raises InvalidJob."""
        texts, roles = template_texts(template)
        if roles is None:
            return cls((_parse_text(texts[0], "the template"),), None)
        pieces = [_parse_text(text, f"message {number} of the template") for number, text in enumerate(texts)]
        return cls(tuple(pieces), roles)

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that are filled in, each once, in order of appearance."""
        return tuple(dict.fromkeys(column for text in self.texts for _, column in text if column is not None))

    def check_cost(self, rows: int) -> None:
        """Raise InvalidJob where the prompts of a shard of so many rows take more than MAX_SHARD_PIECES."""
        pieces = sum(map(len, self.texts))
        if pieces * rows > MAX_SHARD_PIECES:
            raise InvalidJob(
                f"the template has {pieces} pieces, {pieces * rows} in a shard of {rows} rows, more than the "
                f"limit of {MAX_SHARD_PIECES}: shorten it, write what repeats into a column, or give fewer "
                "rows_per_shard"
            )

    @cached_property
    def _uses(self) -> Counter[str | None]:
        """How often each column stands there."""
        return Counter(column for text in self.texts for _, column in text)

    @cached_property
    def _literal_chars(self) -> int:
        return sum(len(literal) for text in self.texts for literal, _ in text)

    def filled_chars(self, values: Mapping[str, object]) -> int:
        """Return how many characters `fill` would build: a few long values may stand there many times."""
        return self._literal_chars + sum(self._uses[name] * len(f"{value}") for name, value in values.items())

    def fill(self, values: Mapping[str, object]) -> str | list[dict[str, str]]:
        """Return the prompt, or the messages, for one row's values."""
        parts: dict[str | None, str] = {column: f"{value}" for column, value in values.items()}
        parts[None] = ""
        filled = [
            "".join([part for literal, name in text for part in (literal, parts[name])])
            for text in self.texts
        ]
        if self.roles is None:
            return filled[0]
        return [{"role": role, "content": text} for role, text in zip(self.roles, filled, strict=True)]


def jinja_hint(texts: Iterable[str]) -> str:
    """What to add to an error where texts look as if they were Jinja's; else nothing."""
    if not any(mark in text for text in texts for mark in ("{{", "{%")):
        return ""
    return "; for Jinja's {{ column }} say so: template_format 'jinja' (--template-format jinja)"


def _parse_text(text: str, what: str) -> Pieces:
    """Cut a text at its braces. what: its name in errors, which say where to look and repeat none of it."""
    pieces: list[tuple[str, str | None]] = []
    try:
        for literal, column, form, conversion in Formatter().parse(text):
            if form or conversion or (column is not None and not _is_plain(column)):
                field = 1 + sum(column is not None for _, column in pieces)
                raise InvalidJob(
                    f"{what}: field {field} is no plain column name; write {{{{ and }}}} for braces of text"
                    f"{jinja_hint([text])}"
                )
            pieces.append((literal, column))
    except ValueError as error:
        raise InvalidJob(
            f"{what}: {error}; write {{{{ and }}}} for braces of text{jinja_hint([text])}"
        ) from None
    return tuple(pieces)


def _is_plain(column: str) -> bool:
    return 0 < len(column) <= MAX_NAME_CHARS and not set(column) & set(".[]")
