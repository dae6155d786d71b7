"""Prompts with the rows behind them that a function checks their answers with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from ..common.json_text import to_json
from ..errors import WrongColumnType
from .nested_values import holds_bytes
from .prompt_source import TEXT_FORMS, PromptSource

#: Between a row's prompt and the JSON of its values, which holds no line break.
_BREAK = "\n"


class CheckedSource(PromptSource):
    """Another source's prompts with the rows' values behind them, so that a text still identifies what is
    asked. `row_sampling.split` takes them apart.

    columns: what the function gets beside the columns that the prompt is made of.
    """

    def __init__(self, source: PromptSource, columns: Sequence[str]) -> None:
        self.columns = tuple(dict.fromkeys((*source.columns, *columns)))
        self.is_chat = source.is_chat
        self._source = source

    def check(self, schema: pa.Schema) -> None:
        self._source.check(schema)
        for column in self.columns:
            if holds_bytes(schema.field(column).type):
                raise WrongColumnType(column, schema.field(column).type, TEXT_FORMS)

    def render(self, values: Mapping[str, Any]) -> str:
        prompt = self._source.render({name: values[name] for name in self._source.columns})
        return f"{prompt}{_BREAK}{to_json({name: values[name] for name in self.columns})}"
