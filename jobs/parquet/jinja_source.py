"""Prompts from Jinja templates over a row's columns."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pyarrow as pa

from ..errors import InvalidJob, WrongColumnType
from ..prompts.jinja_limits import TemplateProblem
from ..prompts.jinja_texts import JinjaTexts
from ..prompts.template_texts import template_texts
from .nested_values import holds_bytes
from .prompt_source import TEXT_FORMS, PromptSource, check_defaults, checked_chat, checked_text
from .row_values import RowProblem


class JinjaSource(PromptSource):
    """A Jinja template whose names are columns, for a text or for the contents of a chat.

    Null is `none` there, unless it has one of the `defaults`; written out, it is its row's error. Lists,
    structs and maps are what they are in Python, and JSON where they are written out.
    """

    def __init__(self, template: Any, defaults: Mapping[str, str] = MappingProxyType({})) -> None:
        """Raises InvalidJob for what is no template, or names no column."""
        texts, self._roles = template_texts(template)
        self.is_chat = self._roles is not None
        self._template, self._defaults = JinjaTexts(texts), defaults
        self.columns = tuple(sorted(self._template.names))
        if not self.columns:
            raise InvalidJob(
                "the template names no column, so that every row would ask the same: "
                "write {{ column }} where a row's value goes"
            )
        check_defaults(defaults, self.columns)

    def check(self, schema: pa.Schema) -> None:
        for column in self.columns:
            if holds_bytes(kind := schema.field(column).type):
                raise WrongColumnType(column, kind, TEXT_FORMS)

    def render(self, values: Mapping[str, Any]) -> str:
        values = {
            name: self._defaults.get(name) if values[name] is None else values[name] for name in self.columns
        }
        try:
            texts = self._template.render(values)
        except TemplateProblem as problem:
            raise RowProblem(f"the template: {problem}") from None
        if self._roles is None:
            return checked_text(texts[0], "prompt")
        pairs = zip(self._roles, texts, strict=True)
        return checked_chat([{"role": role, "content": text} for role, text in pairs])
